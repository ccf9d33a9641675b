"""Sixteen requests of every kind at once: each makes what it makes alone, or is stopped."""

import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configs.parameters import Lora, Parameters
from configs.stage_config import PipelineSettings
from tests.engine.conftest import MakeParameters, plan
from tests.engine.lora_files import save_lora
from tests.engine.recorder import Recorder
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine, Generation
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted

REQUESTS, THREADS = 16, 8
PROMPTS = ("a red circle", "a blue square at the top", "a star", "a heart on a white background")
STYLE, WORDS = Lora("style"), Lora("words")
# Three adapters of which two are kept, so that they make room for each other on the way.
SETS = ((STYLE,), (Lora("style", 0.4),), (WORDS,), (Lora("both", 0.5),), (STYLE, WORDS))


class Canceler(Recorder):
    """Stops once so many steps are done; never without a number."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self._at = at

    def on_step(self, step: int, steps: int) -> None:
        super().on_step(step, steps)
        if self._at is not None and step >= self._at:
            raise Interrupted("canceled")


def drawn(draw: random.Random, make: MakeParameters, schedulers: tuple[str, ...]) -> Parameters:
    return make(
        prompt=draw.choice(PROMPTS),
        seed=draw.randrange(1000),
        num_inference_steps=draw.choice((2, 3, 4, 4, 4)),
        guidance_scale=draw.choice((1.0, 3.0, 3.0, 5.0)),
        width=draw.choice((48, 64, 64)),
        scheduler=draw.choice((None, None, None, *schedulers)),
        negative_prompt=draw.choice((None, None, "blue")),
        num_outputs_per_prompt=draw.choice((1, 1, 1, 2)),
        deterministic=draw.random() < 0.1,
        lora=draw.choice((*[()] * len(SETS), *SETS)),
    )


def save_adapters(folder: Path, pipe: Any) -> PipelineSettings:
    unet, text = {"unet": pipe.unet}, {"text_encoder": pipe.text_encoder}
    save_lora(folder / "style.safetensors", unet, 1)
    save_lora(folder / "words.safetensors", text, 2)
    save_lora(folder / "both.safetensors", {**unet, **text}, 3)
    return PipelineSettings(lora_dir=str(folder), max_cpu_loras=2)


def test_each_of_many_makes_what_it_makes_alone(parameters: MakeParameters, tmp_path: Path):
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    draw = random.Random(seed)
    pipe: Any = load_pipeline(plan())
    settings = save_adapters(tmp_path, pipe)
    engine = Engine(pipe, inspect_abilities(pipe, {}), settings, max_num_seqs=THREADS)
    engine.warm_up()
    asked = [drawn(draw, parameters, engine.abilities.schedulers) for _ in range(REQUESTS)]
    stops = [draw.choice((None, None, None, 0, 1, 2)) for _ in range(REQUESTS)]
    alone = [engine.generate(each, Recorder()) for each in asked]

    def run(index: int) -> Generation | None:
        with engine.request_coming():
            try:
                return engine.generate(asked[index], Canceler(stops[index]))
            except Interrupted:
                return None

    with ThreadPoolExecutor(THREADS) as pool:
        made = list(pool.map(run, range(REQUESTS)))
    for index, (one, expected) in enumerate(zip(made, alone, strict=True)):
        assert (one is None) == (stops[index] is not None), (seed, index)
        if one is not None:
            allowed = 0 if asked[index].deterministic else 1
            for own, other in zip(one.images, expected.images, strict=True):
                difference = np.abs(np.asarray(own).astype(int) - np.asarray(other)).max()
                assert difference <= allowed, (seed, index, asked[index])
    assert max(engine.rendezvous.histogram) > 1
    assert engine.requests_waiting == 0
    again = engine.generate(asked[0], Recorder())
    assert again.images[0].tobytes() == alone[0].images[0].tobytes()


def test_output_k_of_a_request_is_that_of_its_seed_in_any_batch(parameters: MakeParameters):
    pipe: Any = load_pipeline(plan())
    engine = Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=THREADS)
    engine.warm_up()
    asked = [
        parameters(seed=seed, num_outputs_per_prompt=outputs, num_inference_steps=4)
        for seed, outputs in ((5, 3), (50, 1), (500, 3))
    ]
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda each: engine.generate(each, Recorder()), asked))
    for one in made:
        for image, seed in zip(one.images, one.seeds, strict=True):
            alone = parameters(seed=seed, num_inference_steps=4)
            single = engine.generate(alone, Recorder()).images[0]
            assert np.abs(np.asarray(image).astype(int) - np.asarray(single)).max() <= 1
