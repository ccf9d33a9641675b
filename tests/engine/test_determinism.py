"""A deterministic request has the same bytes in any process, any order and any batches."""

import hashlib
import random
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from configs.parameters import IMAGE_TO_IMAGE, INPAINT, Lora, Parameters
from configs.stage_config import PipelineSettings
from tests.e2e.preloaded import FORKS
from tests.engine.conftest import plan
from tests.engine.lora_files import save_lora
from tests.engine.recorder import Recorder
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted

THREADS = 4
CASES: tuple[dict[str, Any], ...] = (
    {"seed": 1},
    {"seed": 2, "negative_prompt": "blue"},
    {"seed": 3, "num_outputs_per_prompt": 3},
    {"seed": 4, "scheduler": "EulerAncestralDiscreteScheduler"},
    {"seed": 5, "scheduler": "KDPM2AncestralDiscreteScheduler"},
    {"seed": 6, "scheduler": "DDPMScheduler", "num_outputs_per_prompt": 2},
    {"seed": 7, "scheduler": "UniPCMultistepScheduler"},
    {"seed": 8, "task": IMAGE_TO_IMAGE, "strength": 0.6},
    {"seed": 9, "task": IMAGE_TO_IMAGE, "strength": 0.6, "scheduler": "HeunDiscreteScheduler"},
    {"seed": 10, "task": INPAINT, "strength": 0.8},
    {"seed": 11, "lora": (Lora("style"),)},
    {"seed": 12, "lora": (Lora("words", 0.5),), "scheduler": "EulerAncestralDiscreteScheduler"},
)


def inputs_of(case: Mapping[str, Any]) -> Inputs:
    task = case.get("task")
    noise = np.random.default_rng(0).integers(0, 256, (80, 70, 3), np.uint8)
    mask = Image.new("L", (70, 80))
    mask.paste(255, (0, 0, 35, 80))
    return Inputs((Image.fromarray(noise),) if task else (), mask if task == INPAINT else None)


def asked_for(case: Mapping[str, Any], **changes: Any) -> Parameters:
    usual: dict[str, Any] = {
        "prompt": "a red circle",
        "width": 64,
        "height": 64,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
    }
    return Parameters(**{**usual, **case, **changes})


def loaded() -> Engine:
    folder = Path(tempfile.mkdtemp())
    pipe: Any = load_pipeline(plan())
    save_lora(folder / "style.safetensors", {"unet": pipe.unet}, 1)
    save_lora(folder / "words.safetensors", {"text_encoder": pipe.text_encoder}, 2)
    # One adapter at a time, so that they make room for each other again and again.
    settings = PipelineSettings(lora_dir=str(folder), max_cpu_loras=1)
    return Engine(pipe, inspect_abilities(pipe, {}), settings, max_num_seqs=THREADS)


def sums_of_a_process(seed: int) -> list[tuple[int, tuple[str, ...]]]:
    """Make each case in a random order, among others that share steps or are canceled."""
    draw = random.Random(seed)
    engine = loaded()
    engine.warm_up()
    order = [*range(len(CASES))]
    draw.shuffle(order)
    beside = [draw.choice((None, None, 0, 1, 3)) for _ in order]

    def make(place: int) -> tuple[int, tuple[str, ...]]:
        case, stop = CASES[order[place]], beside[place]
        if stop is not None:
            try:
                other = asked_for(case, prompt="a star", seed=99)
                engine.generate(other, Recorder(stop_at=stop), inputs_of(case))
            except Interrupted:
                pass
        deterministic = asked_for(case, deterministic=True)
        images = engine.generate(deterministic, Recorder(), inputs_of(case)).images
        sums = (hashlib.sha256(image.tobytes()).hexdigest() for image in images)
        return order[place], tuple(sums)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(make, range(len(order))))


def test_two_processes_make_the_same_bytes_in_any_order():
    with ProcessPoolExecutor(1, FORKS) as pool:
        other = pool.submit(sums_of_a_process, 1)
        second = sums_of_a_process(2)
        first = other.result()
    made: dict[int, set[tuple[str, ...]]] = {}
    for case, sums in (*first, *second):
        made.setdefault(case, set()).add(sums)
    assert {case: len(each) for case, each in made.items()} == dict.fromkeys(range(len(CASES)), 1)
    assert len({sums for each in made.values() for sums in each}) == len(CASES)
