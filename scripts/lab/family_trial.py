"""Tries what a family can do, by running its tiny pipeline through the engine that serves it."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from configs.parameters import FROM_IMAGE_TASKS, INPAINT, VIDEO_TASKS, Abilities, Parameters
from configs.stage_config import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine, Generation
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted, SilentProgress
from workers.sharing.merging import Unmergeable, layout

_TIMEOUT_S = 120
_STEPS = 3


# The first runs alone, and the second checks itself.
_SHARED_STEPS = 5
_LARGEST_DIFFERENCE = 1


def load_folder(folder: Path) -> tuple[Any, Engine]:
    """Load a saved pipeline on one CPU core, as a replica would, and return it with its engine."""
    args = EngineArgs(model=str(folder), device="cpu")
    stage = StageConfig(0, RuntimeConfig((0,)), args)
    pipe = load_pipeline(ReplicaPlan("replica0", 0, stage, (0,)))
    return pipe, Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=4)


def small_request(abilities: Abilities, task: str, **changes: Any) -> Parameters:
    """Return parameters of few steps, of a small size and of as few frames as may be."""
    multiple = abilities.size_multiple
    values: dict[str, Any] = {
        "prompt": "a red circle",
        "seed": 3,
        "width": -(-48 // multiple) * multiple,
        "height": -(-32 // multiple) * multiple,
        "num_inference_steps": _STEPS,
        "task": task,
        "guidance_scale": 3.0 if abilities.guidance_scale else None,
    }
    if task in VIDEO_TASKS:
        step = abilities.frames_step
        values["num_frames"] = 1 + step if step > 1 else abilities.default_frames
    if task in FROM_IMAGE_TASKS and abilities.strength:
        values["strength"] = 1.0
    return Parameters(**{**values, **changes})


def small_inputs(task: str) -> Inputs:
    """Return the image, and the mask, that the task needs."""
    image = Image.new("RGB", (256, 160), (20, 60, 200))
    ImageDraw.Draw(image).ellipse((64, 40, 160, 120), fill=(220, 30, 40))
    mask = Image.new("L", image.size)
    ImageDraw.Draw(mask).rectangle((0, 0, 128, 160), fill=255)
    return Inputs((image,) if task in FROM_IMAGE_TASKS else (), mask if task == INPAINT else None)


def pixels(generation: Generation, index: int = 0) -> Any:
    """Return an output as whole numbers from 0 to 255."""
    made = generation.videos or generation.images
    return np.asarray(getattr(made[index], "frames", made[index])).astype(int)


class Watcher(SilentProgress):
    """Notes the steps, waits for others after the first one, and stops where it is told."""

    def __init__(self, start: threading.Barrier | None = None, stop_at: int | None = None) -> None:
        """Wait at `start`; stop at call number `stop_at`."""
        self.calls: list[tuple[int, int]] = []
        self.pictures = 0
        self._start = start
        self._stop_at = stop_at

    def on_step(self, step: int, steps: int) -> None:
        """Note where the run is."""
        if self._start is not None and step == 1 and self.calls[-1][0] == 0:
            self._start.wait(_TIMEOUT_S)
        self.calls.append((step, steps))
        if len(self.calls) - 1 == self._stop_at:
            raise Interrupted("canceled")

    def wants_preview(self) -> bool:
        """Want all."""
        return True

    def on_preview(self, step: int, picture: Image.Image) -> None:
        """Count it."""
        self.pictures += 1


def together(
    engine: Engine, asked: list[Parameters], patience_s: float = _TIMEOUT_S
) -> list[Generation]:
    """Run requests at once; those whose calls can be shared share them from the second step on.

    A call waits so long for those that it may be shared with.
    """
    rendezvous = engine.rendezvous

    def be_patient() -> None:
        rendezvous.queue.max_wait_s, rendezvous.queue.wait_share = patience_s, 1e12

    # Until all have made a step nobody waits: not all are in their loops yet.
    rendezvous.queue.max_wait_s = 0.0
    start = threading.Barrier(len(asked), action=be_patient)

    def run(each: Parameters) -> Generation:
        return engine.generate(each, Watcher(start), small_inputs(each.task))

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(run, asked))


@dataclass(frozen=True)
class Trial:
    """What came out for one family.

    Attributes:
        pipeline: Its class.
        abilities: What its replicas publish.
        merges: `yes`, or why requests of it run their steps alone.
        cancels: Whether a run that was ended left nothing behind, for each of its tasks.
        previews: Whether small pictures came while it ran.
        lora: Whether the pipeline takes adapters.
        context_parallel: Whether its denoiser says how to be cut over devices.
    """

    pipeline: str
    abilities: Abilities
    merges: str
    cancels: bool
    previews: bool
    lora: bool
    context_parallel: bool


def try_family(folder: Path) -> Trial:
    """Run every task of a saved pipeline: whole, ended half way, again, and two at once."""
    pipe, engine = load_folder(folder)
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    watcher = Watcher()
    cancels = all(_cancels(engine, task, watcher) for task in engine.abilities.tasks)
    return Trial(
        pipeline=type(pipe).__name__,
        abilities=engine.abilities,
        merges=_merges(folder),
        cancels=cancels,
        previews=watcher.pictures > 0,
        lora=hasattr(pipe, "load_lora_weights"),
        context_parallel=getattr(denoiser, "_cp_plan", None) is not None,
    )


def _cancels(engine: Engine, task: str, watcher: Watcher) -> bool:
    asked, inputs = small_request(engine.abilities, task), small_inputs(task)
    whole = engine.generate(asked, Watcher(), inputs)
    stopped = Watcher(stop_at=2)
    try:
        engine.generate(asked, stopped, inputs)
    except Interrupted:
        again = engine.generate(asked, watcher, inputs)
        return len(stopped.calls) == 3 and bool(np.array_equal(pixels(whole), pixels(again)))
    return False


def _merges(folder: Path) -> str:
    """Try two requests whose prompts have equal and then different lengths."""
    # Each time anew: what an engine measured on a busy machine may keep it from merging.
    pipe, engine = load_folder(folder)
    denoiser, reasons = getattr(pipe, "transformer", None) or pipe.unet, list[str]()
    names = list(inspect.signature(type(denoiser).forward).parameters)[1:]

    def look(_: Any, args: Any, kwargs: Any) -> None:
        try:
            layout({**dict(zip(names, args, strict=False)), **kwargs})
        except Unmergeable as error:
            reasons.append(error.name)

    denoiser.register_forward_pre_hook(look, with_kwargs=True)
    task = engine.abilities.tasks[0]
    asked = [
        small_request(engine.abilities, task, seed=seed, num_inference_steps=_SHARED_STEPS)
        for seed in (3, 4)
    ]
    alone = [engine.generate(each, Watcher(), small_inputs(task)) for each in asked]
    made = together(engine, asked)
    _compare(made, alone)
    if reasons:
        return f"no: there is no rule for `{reasons[0]}`"
    if min(each.batch_mean for each in made) == 1:
        return "no: merged, outputs differ by more than rounding"
    longer = asked[1].with_changes({"prompt": "a small green square on a white ground"})
    _, other_engine = load_folder(folder)
    alone[1] = other_engine.generate(longer, Watcher(), small_inputs(task))
    made = together(other_engine, [asked[0], longer])
    _compare(made, alone)
    if min(each.batch_mean for each in made) == 1:
        return "if the prompts are equally long"
    return "yes"


def _compare(made: list[Generation], alone: list[Generation]) -> None:
    pairs = zip(made, alone, strict=True)
    worst = max(np.abs(pixels(one) - pixels(other)).max() for one, other in pairs)
    if worst > _LARGEST_DIFFERENCE:
        raise AssertionError(f"merged, pixels differ by {worst}")
