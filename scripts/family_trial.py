"""Tries what a family can do, by running its tiny pipeline through the engine that serves it."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from configs.stages import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from routing.parameters import FROM_IMAGE_TASKS, INPAINT, VIDEO_TASKS, Abilities, Parameters
from workers.engine import Engine, Generation
from workers.inputs import Inputs
from workers.merging import Unmergeable, layout
from workers.observer import Interrupted, SilentObserver

_TIMEOUT_S = 120
_STEPS = 3
# Who comes first may run its first steps alone, and the first shared one proves itself.
_SHARED_STEPS = 6
_LARGEST_DIFFERENCE = 1


def load_folder(folder: Path) -> Engine:
    """Load a saved pipeline on one CPU core, as a replica would."""
    args = EngineArgs(model=str(folder), device="cpu")
    return Engine.load(ReplicaPlan("replica0", 0, StageConfig(0, RuntimeConfig((0,)), args), (0,)))


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


class Watcher(SilentObserver):
    """Notes the steps, waits for others before the first one, and stops where it is told."""

    def __init__(self, start: threading.Barrier | None = None, stop_at: int | None = None) -> None:
        """Wait at `start`; stop at call number `stop_at`."""
        self.calls: list[tuple[int, int]] = []
        self._start = start
        self._stop_at = stop_at

    def on_step(self, step: int, steps: int) -> None:
        """Note where the run is."""
        if self._start is not None and len(self.calls) == 1:
            self._start.wait(_TIMEOUT_S)
        self.calls.append((step, steps))
        if len(self.calls) - 1 == self._stop_at:
            raise Interrupted("canceled")


def together(engine: Engine, asked: list[Parameters]) -> list[Generation]:
    """Run requests at once; those whose calls can be shared share them."""
    engine.rendezvous.max_wait_s, engine.rendezvous.wait_share = _TIMEOUT_S, 1e12
    start = threading.Barrier(len(asked))

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
        lora: Whether the pipeline takes adapters.
        context_parallel: Whether its denoiser says how to be cut over devices.
    """

    pipeline: str
    abilities: Abilities
    merges: str
    cancels: bool
    lora: bool
    context_parallel: bool


def try_family(engine: Engine, pipe: Any) -> Trial:
    """Run every task of a family: whole, ended half way, again, and two at once."""
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    tasks = engine.abilities.tasks
    return Trial(
        pipeline=type(pipe).__name__,
        abilities=engine.abilities,
        merges=_merges(engine, denoiser),
        cancels=all(_cancels(engine, task) for task in tasks),
        lora=hasattr(pipe, "load_lora_weights"),
        context_parallel=getattr(denoiser, "_cp_plan", None) is not None,
    )


def _cancels(engine: Engine, task: str) -> bool:
    asked, inputs = small_request(engine.abilities, task), small_inputs(task)
    whole = engine.generate(asked, Watcher(), inputs)
    stopped = Watcher(stop_at=2)
    try:
        engine.generate(asked, stopped, inputs)
    except Interrupted:
        again = engine.generate(asked, Watcher(), inputs)
        return len(stopped.calls) == 3 and bool(np.array_equal(pixels(whole), pixels(again)))
    return False


def _merges(engine: Engine, denoiser: Any) -> str:
    """Try two requests whose prompts have equal and then different lengths."""
    reasons: list[str] = []
    signature = inspect.signature(type(denoiser).forward)

    def look(module: Any, args: Any, kwargs: Any) -> None:
        try:
            layout({k: v for k, v in signature.bind(module, *args, **kwargs).arguments.items()
                    if k != "self"})  # fmt: skip
        except Unmergeable as error:
            reasons.append(error.name)

    task = engine.abilities.tasks[0]
    hook = denoiser.register_forward_pre_hook(look, with_kwargs=True)
    try:
        asked = [
            small_request(engine.abilities, task, seed=seed, num_inference_steps=_SHARED_STEPS)
            for seed in (3, 4)
        ]
        alone = [engine.generate(each, Watcher(), small_inputs(task)) for each in asked]
        made = together(engine, asked)
    finally:
        hook.remove()
    worst = max(
        np.abs(pixels(one) - pixels(other)).max() for one, other in zip(made, alone, strict=True)
    )
    if worst > _LARGEST_DIFFERENCE:
        raise AssertionError(f"merged, pixels differ by {worst}")
    if reasons:
        return f"no: no rule for `{reasons[0]}`"
    if min(each.batch_mean for each in made) == 1:
        return "no: merged, outputs differ by more than rounding"
    longer = asked[1].with_changes({"prompt": "a small green square on a white ground"})
    if min(each.batch_mean for each in together(engine, [asked[0], longer])) == 1:
        return "if the prompts are equally long"
    return "yes"
