"""Families go through the loader and engine that serve them; hardly a word there is about one."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import GenerationFailed
from configs.parameters import (
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    VIDEO_TASKS,
    Parameters,
)
from scripts.lab.families import FAMILIES
from scripts.lab.family_trial import (
    Watcher,
    pixels,
    small_inputs,
    small_request,
    together,
    try_family,
)
from scripts.lab.models_table import COLUMNS, PAGE, page, row
from tests.engine.conftest import BUNDLED, SavedFamily, count_decodes, plan
from tests.engine.recorder import Recorder
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted

IMAGES = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT)
EDITING = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE)
VIDEOS = (TEXT_TO_VIDEO, IMAGE_TO_VIDEO)
# tasks, size multiple, default size, text tokens, guidance, true CFG
EXPECTED: dict[str, tuple[Any, ...]] = {
    "stable_diffusion": (IMAGES, 8, (128, 128), 24, True, False),
    "stable_diffusion_xl": (IMAGES, 8, (128, 128), 24, True, False),
    "stable_diffusion_3": (IMAGES, 16, (128, 128), 256, True, False),
    "flux": (IMAGES, 16, (1024, 1024), 512, True, True),
    "flux_kontext": (EDITING, 16, (1024, 1024), 512, True, True),
    "qwen_image": (IMAGES, 16, (1024, 1024), 512, False, True),
    "qwen_image_edit": ((IMAGE_TO_IMAGE,), 16, (1024, 1024), 512, False, True),
    "pixart": ((TEXT_TO_IMAGE,), 16, (256, 256), 120, True, False),
    "sana": ((TEXT_TO_IMAGE,), 32, (1024, 1024), 300, True, False),
    "z_image": (IMAGES, 16, (1024, 1024), 511, True, False),
    "wan": ((TEXT_TO_VIDEO,), 16, (832, 480), 512, True, False),
    "wan_image_to_video": ((IMAGE_TO_VIDEO,), 16, (832, 480), 512, True, False),
    "ltx": (VIDEOS, 32, (704, 512), 128, True, False),
    "latte": ((TEXT_TO_VIDEO,), 16, (512, 512), 120, True, False),
}
# default frames, further ones, frames in a second
FRAMES = {
    "wan": (81, 4, 16.0),
    "wan_image_to_video": (81, 4, 16.0),
    "ltx": (161, 8, 25.0),
    "latte": (16, 15, 8.0),
}
ASKED = Parameters(
    prompt="a red circle", seed=3, width=48, height=32, num_inference_steps=4, guidance_scale=3.0
)
CASES = [(name, task) for name, expected in EXPECTED.items() for task in expected[0]]


class Loaded:
    """One family, loaded."""

    def __init__(self, folder: Path) -> None:
        self.pipe = load_pipeline(plan(folder))
        self.decodes = count_decodes(self.pipe)
        self.engine = Engine(self.pipe, inspect_abilities(self.pipe, {}), max_num_seqs=4)
        self.alone = cache(self._alone)

    def _alone(self, task: str, seed: int) -> Any:
        """The pixels of one output that nothing else is made with."""
        asked = small_request(self.engine.abilities, task, seed=seed)
        return pixels(self.engine.generate(asked, Watcher(), small_inputs(task)))


@pytest.fixture(scope="module")
def families(saved: SavedFamily) -> Callable[[str], Loaded]:
    """Loads each family once, when it is first asked for."""
    return cache(lambda name: Loaded(saved(name)))


def test_every_family_is_expected_to_do_something():
    assert EXPECTED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_can_do_is_read_from_its_pipeline(families: Any, name: str):
    tasks, multiple, size, tokens, guidance, true_cfg = EXPECTED[name]
    abilities = families(name).engine.abilities
    assert abilities.tasks == tasks
    assert abilities.size_multiple == multiple
    assert (abilities.default_width, abilities.default_height) == size
    assert abilities.max_prompt_tokens == tokens
    assert (abilities.guidance_scale, abilities.true_cfg_scale) == (guidance, true_cfg)
    assert abilities.strength == (INPAINT in tasks)
    assert abilities.max_images == (0 if tasks[-1] in {TEXT_TO_IMAGE, TEXT_TO_VIDEO} else 1)
    frames, step, fps = FRAMES.get(name, (None, 1, None))
    assert (abilities.default_frames, abilities.frames_step) == (frames, step)
    assert abilities.default_fps == fps
    assert abilities.max_frames == (16 if name == "latte" else None)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_task_of_a_family_runs_stops_at_any_step_and_runs_again(
    families: Any, name: str, task: str
):
    family: Loaded = families(name)
    engine, inputs = family.engine, small_inputs(task)
    asked = small_request(engine.abilities, task)
    watcher = Watcher()
    before = len(family.decodes)
    made = engine.generate(asked, watcher, inputs)
    decoded = len(family.decodes)
    assert decoded > before
    outputs = made.videos if task in VIDEO_TASKS else made.images
    assert [each.size for each in outputs] == [(asked.width, asked.height)]
    assert [each.num_frames for each in made.videos] == [asked.num_frames] * len(made.videos)
    assert watcher.calls == [(0, 3), *((step, 3) for step in range(4))]
    assert made.warnings == ()

    for call in (0, 1, 3, 4):
        with pytest.raises(Interrupted):
            engine.generate(asked, Watcher(stop_at=call), inputs)
    assert len(family.decodes) == decoded
    assert np.array_equal(family.alone(task, asked.seed), pixels(made))
    assert not np.array_equal(family.alone(task, asked.seed + 1), pixels(made))


# Latte itself treats the padding of its text otherwise as soon as there are two outputs.
@pytest.mark.parametrize(("name", "task"), [case for case in CASES if case[0] != "latte"])
def test_outputs_of_a_family_are_what_their_seeds_make_alone(families: Any, name: str, task: str):
    family: Loaded = families(name)
    engine, inputs = family.engine, small_inputs(task)
    asked = small_request(engine.abilities, task, num_outputs_per_prompt=2)
    both = engine.generate(asked, Watcher(), inputs)
    for index in (0, 1):
        single = family.alone(task, asked.seed + index)
        assert np.abs(pixels(both, index) - single).max() <= 1


# Those of one task do so for their rows in the page of models, with prompts of other lengths too.
@pytest.mark.parametrize("name", [name for name, known in EXPECTED.items() if len(known[0]) > 1])
def test_requests_of_a_family_that_run_together_make_what_each_makes_alone(
    families: Any, name: str
):
    engine = families(name).engine
    prompts = ("a red circle", "a blue square", "a red square")
    asked = [
        small_request(engine.abilities, task, seed=seed, num_inference_steps=5, prompt=prompt)
        for seed, (task, prompt) in enumerate(zip(engine.abilities.tasks, prompts, strict=False))
    ]
    alone = [engine.generate(each, Watcher(), small_inputs(each.task)) for each in asked]
    for one, other in zip(together(engine, asked), alone, strict=True):
        assert np.abs(pixels(one) - pixels(other)).max() <= 1


def test_prompts_of_different_lengths_meet_where_the_denoiser_takes_a_mask(saved: SavedFamily):
    engine = Loaded(saved("qwen_image")).engine
    task = engine.abilities.tasks[0]
    prompts = ("a", "a red circle on a white ground", "a blue square")
    asked = [
        small_request(engine.abilities, task, seed=seed, num_inference_steps=5, prompt=prompt)
        for seed, prompt in enumerate(prompts)
    ]
    # Two calls in each step, the one with the longer text of its own.
    asked[0] = asked[0].with_changes({"negative_prompt": "a star", "true_cfg_scale": 2.0})
    alone = [engine.generate(each, Watcher(), small_inputs(task)) for each in asked]
    made = together(engine, asked)
    for one, other in zip(made, alone, strict=True):
        assert one.batch_mean > 1
        assert np.abs(pixels(one) - pixels(other)).max() <= 1


@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_the_page_of_models_says_what_comes_out(name: str, saved: SavedFamily):
    folder = BUNDLED if name == "tiny" else saved(name)
    assert row(name, try_family(folder)) in PAGE.read_text().splitlines()


def test_the_page_of_models_is_the_one_that_the_command_writes():
    written = PAGE.read_text()
    rows = [line for line in written.splitlines() if line.count("|") == COLUMNS + 1]
    assert page(dict.fromkeys(("tiny", *FAMILIES)), rows[2 : 3 + len(FAMILIES)]) == written


def test_both_denoisers_of_wan_take_part(families: Any):
    family = families("wan")
    counts = {"transformer": 0, "transformer_2": 0}
    for part in counts:

        def note(*_: object, part: str = part):
            counts[part] += 1

        getattr(family.pipe, part).register_forward_pre_hook(note)
    family.engine.generate(small_request(family.engine.abilities, TEXT_TO_VIDEO), Watcher())
    assert min(counts.values()) > 0


def test_an_image_to_video_shows_its_image(families: Any):
    engine = families("wan_image_to_video").engine
    asked, inputs = small_request(engine.abilities, IMAGE_TO_VIDEO), small_inputs(IMAGE_TO_VIDEO)
    made = engine.generate(asked, Watcher(), inputs)
    other = engine.generate(asked, Watcher(), inputs.fitted(64, 64))
    assert not np.array_equal(pixels(made), pixels(other))


def test_a_family_is_warmed_up_for_its_own_task(families: Any):
    for name in ("wan_image_to_video", "latte"):
        pipe = families(name).pipe
        defaults = {"width": 48, "height": 48, "num_frames": 5 if "wan" in name else 16}
        Engine(pipe, inspect_abilities(pipe, defaults)).warm_up()


def test_an_autoencoder_that_a_failing_decode_left_upcast_is_put_back(saved: SavedFamily):
    pipe = load_pipeline(plan(saved("stable_diffusion_xl"), dtype="float16"))
    engine = Engine(pipe, inspect_abilities(pipe, {}))
    whole = engine.generate(ASKED, Recorder())
    decode = pipe.vae.decode

    def fail(*_: object, **__: object) -> None:
        assert pipe.vae.dtype == torch.float32
        raise RuntimeError("no decode today")

    pipe.vae.decode = fail
    with pytest.raises(GenerationFailed, match="no decode today"):
        engine.generate(ASKED, Recorder())
    assert pipe.vae.dtype == torch.float16
    pipe.vae.decode = decode
    assert engine.generate(ASKED, Recorder()).images[0].tobytes() == whole.images[0].tobytes()
