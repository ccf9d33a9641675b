"""Tries a tiny pipeline through the engine: served, shared, canceled, counted."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.errors import ServingError
from configs.parameters import FROM_IMAGE_TASKS, VIDEO_TASKS, Parameters
from configs.stage_config import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from scripts.lab.family_trial import Watcher, pixels, small_inputs, together
from workers.devices.chunk import denoisers
from workers.engine.arguments import call_arguments
from workers.engine.engine import Engine, Generation
from workers.engine.generation import frames_in, images_in, to_images, to_videos
from workers.engine.loader import load_pipeline
from workers.engine.pipelines import task_pipelines
from workers.engine.progress import Interrupted
from workers.families import FRAME_COUNTS
from workers.sharing.merging import Unmergeable, layout

ROUNDING = 1


_STEPS = 4


# Longest that a call waits for others; theirs may be of another kind.
_PATIENCE_S = 20.0


_STRENGTH = 0.7


# Of the last, the text is longer.
_PROMPTS = ("a red cat", "a blue dog", "a gold fish in the tall blue sea")


def small_request(
    engine: Engine, task: str, called_with: Mapping[str, Any], **changes: Any
) -> Parameters:
    """Return parameters of few steps, as a test calls its pipeline."""
    abilities = engine.abilities
    values: dict[str, Any] = {
        "prompt": _PROMPTS[0],
        "seed": 3,
        "task": task,
        "width": abilities.default_width,
        "height": abilities.default_height,
        "num_inference_steps": _STEPS,
        "num_frames": abilities.default_frames if task in VIDEO_TASKS else None,
        "fps": abilities.default_fps if task in VIDEO_TASKS else None,
    }
    if abilities.guidance_scale:
        values["guidance_scale"] = called_with.get("guidance_scale", 3.0)
    if task in FROM_IMAGE_TASKS and abilities.strength:
        values["strength"] = _STRENGTH
    return Parameters(**{**values, **changes})


def try_to_merge(plan: ReplicaPlan, task: str, called_with: Mapping[str, Any]) -> str:
    """Return why requests of a task do not share their steps, be the prompts equally long or not.

    Empty where they do, and come out as each does alone.
    """
    merged, reason = _merge_prompts(plan, task, called_with, _PROMPTS)
    if merged or reason.startswith("WRONG"):
        return reason
    merged, reason = _merge_prompts(plan, task, called_with, _PROMPTS[:2] + _PROMPTS[:1])
    return "if the prompts are equally long" if merged else reason


def _merge_prompts(
    plan: ReplicaPlan, task: str, called_with: Mapping[str, Any], prompts: tuple[str, ...]
) -> tuple[bool, str]:
    # Anew: what an engine measured on a busy machine may keep it from merging.
    engine, reasons = Engine.load(plan), list[str]()
    for denoiser in denoisers(engine.pipe).values():
        denoiser.register_forward_pre_hook(_looks(denoiser, reasons), with_kwargs=True)
    asked = [
        small_request(engine, task, called_with, prompt=prompt, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    if asked[0].strength is not None:  # so few steps have no share that shows much
        asked = [each.with_changes({"strength": 1.0}) for each in asked]
    alone = [engine.generate(each, Watcher(), small_inputs(task)) for each in asked]
    before = engine.rendezvous.histogram
    made = together(engine, asked, _PATIENCE_S)
    shared = {
        size: count - before.get(size, 0)
        for size, count in engine.rendezvous.histogram.items()
        if size > 1
    }
    pairs = zip(made, alone, strict=True)
    worst = max(int(np.abs(pixels(one) - pixels(other)).max()) for one, other in pairs)
    if worst > ROUNDING:
        return False, f"WRONG: merged, pixels differ by {worst}"
    if reasons:
        return False, f"no: there is no rule for `{reasons[0]}`"
    if not any(shared.values()) or min(each.batch_mean for each in made) == 1:
        return False, "no: merged, outputs differ by more than rounding"
    return True, ""


def _looks(denoiser: Any, reasons: list[str]) -> Any:
    names = list(inspect.signature(type(denoiser).forward).parameters)[1:]

    def look(_: Any, args: Any, kwargs: Any) -> None:
        try:
            layout({**dict(zip(names, args, strict=False)), **kwargs})
        except Unmergeable as error:
            reasons.append(error.name)

    return look


_SLOTS = 4


_CANCELED_AT = 2


@dataclass
class Findings:
    """What came out for one pipeline; sentences where something did not.

    Attributes:
        test: The class of diffusers' tests that built it.
        pipeline: Its class.
        tasks: Those that were tried.
        status: `tried`, `not built`, `not served`, `failed` or `hung`.
        reason: Why it was not tried to the end.
        runs: Whether a request alone makes what the bare pipeline makes, and again the same bytes.
        merges: Whether three requests share forwards and come out as alone, or why not.
        starts: Whether requests may start together as one pipeline call.
        cancels: Whether a canceled request ends at its step and leaves nothing behind.
        counts: Whether the steps told are those made.
        seconds: It took.
    """

    test: str
    pipeline: str = ""
    tasks: list[str] = field(default_factory=list)
    status: str = "failed"
    reason: str = ""
    runs: str = ""
    merges: str = ""
    starts: str = ""
    cancels: str = ""
    counts: str = ""
    seconds: float = 0.0

    def as_document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def try_folder(folder: Path, called_with: Mapping[str, Any], findings: Findings) -> None:
    """Try the tasks of the saved pipeline that are its own class's, and note what comes out.

    Raises:
        ModelLoadFailed: The loader or the warm-up refused it.
    """
    plan = _plan(folder, called_with)
    engine = Engine.load(plan)
    bare = task_pipelines(load_pipeline(plan))
    own = [task for task, pipe in bare.items() if pipe is next(iter(bare.values()))]
    findings.tasks = own
    engine.warm_up()
    batch = [task for task in own if task in engine.batched_tasks]
    findings.starts = "yes" if batch == own else "no"
    engine.turns.most_outputs = 1  # each of the next runs starts by itself
    for task in own:
        asked = small_request(engine, task, called_with)
        expected, steps = _made_bare(bare[task], asked)
        watcher = Watcher()
        made = engine.generate(asked, watcher, small_inputs(task))
        again = engine.generate(asked, Watcher(), small_inputs(task))
        _note(findings, "runs", _difference_from(made, again, expected))
        # How many there are a pipeline may say only at the first.
        told = [(step, steps) for step in range(1, steps + 1)]
        heard = list(dict.fromkeys(watcher.calls))
        counted = heard[-len(told) :] == told and made.steps == steps
        _note(findings, "counts", "" if counted else f"told {watcher.calls} of {steps}")
        _note(findings, "cancels", _cancel(engine, asked, made))
    _note(findings, "merges", try_to_merge(plan, own[0], called_with))
    findings.status = "tried"


def _note(findings: Findings, name: str, fault: str) -> None:
    if fault or not getattr(findings, name):
        setattr(findings, name, fault or "yes")


def _plan(folder: Path, called_with: Mapping[str, Any]) -> ReplicaPlan:
    names = ("width", "height")
    defaults = {name: called_with[name] for name in names if called_with.get(name)}
    counts = [called_with[name] for name in FRAME_COUNTS if called_with.get(name)]
    if counts:
        defaults["num_frames"] = counts[0]
    args = EngineArgs(model=str(folder), device="cpu", max_num_seqs=_SLOTS)
    bare = load_pipeline(ReplicaPlan("sweep", 0, StageConfig(0, RuntimeConfig((0,)), args), (0,)))
    _fit(bare, defaults)
    stage = StageConfig(0, RuntimeConfig((0,)), args, default_sampling_params=defaults)
    return ReplicaPlan("sweep", 0, stage, (0,))


def _fit(pipe: Any, defaults: dict[str, Any]) -> None:
    """Make sizes of a test such as the engine takes them."""
    from workers.engine.abilities import inspect_abilities

    abilities = inspect_abilities(pipe, {})
    multiple = abilities.size_multiple
    for name, own in (("width", abilities.default_width), ("height", abilities.default_height)):
        size = defaults.get(name) or min(own, max(multiple, 32))
        defaults[name] = -(-size // multiple) * multiple
    if abilities.default_frames:
        step = abilities.frames_step
        frames = defaults.get("num_frames") or abilities.default_frames
        defaults["num_frames"] = 1 + -(-(frames - 1) // step) * step


def _made_bare(pipe: Any, asked: Parameters) -> tuple[Any, int]:
    """Pixels of the pipeline without the engine, and how many steps it made."""
    kind, steps = type(pipe.scheduler), dict[int, int]()
    step = kind.step

    @functools.wraps(step)
    def counted(scheduler: Any, *args: Any, **options: Any) -> Any:
        # Those of copies are not steps of the whole.
        steps[id(scheduler)] = steps.get(id(scheduler), 0) + 1
        return step(scheduler, *args, **options)

    kind.step = counted
    try:
        with torch.inference_mode():
            output = pipe(**call_arguments(asked, type(pipe), small_inputs(asked.task)))
    finally:
        kind.step = step
    count = next(iter(steps.values()))
    if asked.makes_video:
        return to_videos(frames_in(output), 8.0)[0].frames.astype(int), count
    return np.asarray(to_images(images_in(output))[0]).astype(int), count


def _difference_from(made: Generation, again: Generation, expected: Any) -> str:
    one = pixels(made)
    if one.shape != expected.shape:
        return f"shape {one.shape}, the bare pipeline {expected.shape}"
    worst = int(np.abs(one - expected).max())
    if worst > ROUNDING:
        return f"differs from the bare pipeline by {worst}"
    return "" if np.array_equal(one, pixels(again)) else "differs from itself"


def _cancel(engine: Engine, asked: Parameters, whole: Generation) -> str:
    stopped = Watcher(stop_at=_CANCELED_AT)
    try:
        engine.generate(asked, stopped, small_inputs(asked.task))
    except Interrupted:
        after = engine.generate(asked, Watcher(), small_inputs(asked.task))
        return "" if np.array_equal(pixels(whole), pixels(after)) else "the next one differs"
    return "it was not ended"


def describe(error: BaseException) -> str:
    """Return what went wrong, in one line."""
    kind = "" if isinstance(error, ServingError) else f"{type(error).__name__}: "
    return f"{kind}{error}".strip().split("\n")[0][:300]
