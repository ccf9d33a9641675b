"""Requests that share denoiser calls make what each makes alone: on the engine and on families."""

import copy
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
)

from configs.errors import NonFiniteOutput
from configs.parameters import Parameters
from scripts.lab.image_families import z_image_transformer
from tests.engine.conftest import TIMEOUT_S, MakeParameters, patient
from tests.engine.recorder import Recorder
from tests.engine.tiny_families import FAMILIES
from tests.engine.toy_denoiser import Gate
from tests.waiting import wait_until
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine, Generation
from workers.engine.progress import Interrupted
from workers.sharing.rendezvous import Rendezvous

PROMPTS = ("a red circle", "a blue square at the top", "a star", "a green heart on a white ground")


class Starter(Recorder):
    """Lets a run enter its loop when all others are about to; may stop it."""

    def __init__(self, start: threading.Barrier, stop_at_step: int | None = None) -> None:
        super().__init__()
        self._start = start
        self._waited = False
        self._stop_at_step = stop_at_step

    def on_step(self, step: int, steps: int) -> None:
        super().on_step(step, steps)
        if step == self._stop_at_step:
            raise Interrupted("canceled")

    def guidance(self) -> Mapping[str, float | None]:
        # Asked between steps only, never while a run waits for its turn.
        if not self._waited:
            self._waited = True
            self._start.wait(TIMEOUT_S)
        return super().guidance()


@pytest.fixture
def asked(parameters: MakeParameters):
    steps = (6, 9, 5, 8)
    return [
        parameters(
            prompt=prompt, seed=seed, num_inference_steps=steps[seed], guidance_scale=2 + seed
        )
        for seed, prompt in enumerate(PROMPTS)
    ]


def together(
    engine: Engine,
    asked: list[Parameters],
    stop_at: dict[int, int] | None = None,
    inputs: list[Inputs] | None = None,
):
    start = threading.Barrier(len(asked))

    def run(index: int):
        try:
            starter = Starter(start, (stop_at or {}).get(index))
            return engine.generate(asked[index], starter, inputs[index] if inputs else None)
        except Interrupted as interrupted:
            return interrupted

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(run, range(len(asked))))


def difference(one: Any, other: Any):
    assert isinstance(one, Generation)
    assert isinstance(other, Generation)
    pairs = zip(one.images, other.images, strict=True)
    return max(np.abs(np.asarray(a).astype(int) - np.asarray(b)).max() for a, b in pairs)


def test_four_requests_share_their_steps_and_make_what_each_makes_alone(
    sharing: Engine, asked: list[Parameters]
):
    alone = [sharing.generate(each, Recorder()) for each in asked]
    made = together(sharing, asked)
    for each, expected in zip(made, alone, strict=True):
        assert difference(each, expected) <= 1
        assert each.batch_mean > 1.5
    assert max(sharing.rendezvous.histogram) > 1


def test_requests_with_other_schedulers_and_several_outputs_share_too(
    sharing: Engine, parameters: MakeParameters
):
    names = (None, "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler")
    asked = [
        parameters(seed=seed, scheduler=name, num_outputs_per_prompt=1 + seed)
        for seed, name in enumerate(names)
    ]
    alone = [sharing.generate(each, Recorder()) for each in asked]
    made = together(sharing, asked)
    assert max(map(difference, made, alone)) <= 1
    assert max(sharing.rendezvous.histogram) > 1


def test_sizes_are_not_mixed(sharing: Engine, parameters: MakeParameters):
    asked = [parameters(seed=1), parameters(seed=2, width=48)]
    alone = [sharing.generate(each, Recorder()) for each in asked]
    made = together(sharing, asked)
    for each, expected in zip(made, alone, strict=True):
        assert difference(each, expected) == 0
        assert each.batch_mean == 1.0
    assert set(sharing.rendezvous.histogram) == {1}


def test_a_deterministic_request_runs_alone_among_others(sharing: Engine, asked: list[Parameters]):
    asked[1] = asked[1].with_changes({"deterministic": True})
    alone = [sharing.generate(each, Recorder()) for each in asked]
    made = together(sharing, asked)
    assert difference(made[1], alone[1]) == 0
    assert made[1].batch_mean == 1.0
    assert max(map(difference, made, alone)) <= 1
    assert max(sharing.rendezvous.histogram) == 3


@pytest.mark.parametrize("step", [1, 4])
def test_one_of_four_is_canceled_and_the_others_go_on(
    sharing: Engine, asked: list[Parameters], step: int
):
    alone = [sharing.generate(each, Recorder()) for each in asked]
    made = together(sharing, asked, stop_at={2: step})
    assert isinstance(made.pop(2), Interrupted)
    assert max(map(difference, made, [*alone[:2], alone[3]])) <= 1
    assert max(sharing.rendezvous.histogram) > 1
    assert sharing.rendezvous.waiting == 0


def test_a_failing_request_leaves_the_others_unharmed(
    sharing: Engine, pipe: Any, asked: list[Parameters]
):
    alone = [sharing.generate(each, Recorder()) for each in asked]
    asked[1] = asked[1].with_changes({"guidance_scale": 1e38})
    start = threading.Barrier(4)

    def run(each: Parameters):
        try:
            return sharing.generate(each, Starter(start))
        except NonFiniteOutput as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(run, asked))
    assert "NaN" in str(made.pop(1))
    assert max(map(difference, made, [alone[0], *alone[2:]])) <= 1


def latents(pipe: Any, scheduler: Any, index: int, size: int = 32) -> torch.Tensor:
    """What the pipeline's own call makes: nothing of the engine is in the reference."""
    own = copy.copy(pipe)
    own.__dict__["scheduler"] = copy.deepcopy(scheduler)
    own.set_progress_bar_config(disable=True)
    made: torch.Tensor = own(
        PROMPTS[index],
        height=size,
        width=size,
        num_inference_steps=(5, 7, 4, 6)[index],
        generator=torch.Generator().manual_seed(index),
        output_type="latent",
        **({"use_resolution_binning": False} if "PixArt" in type(pipe).__name__ else {}),
    ).images
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_families_make_what_their_unmodified_pipelines_make(name: str):
    torch.manual_seed(0)
    pipe = FAMILIES[name]()
    schedulers = [pipe.scheduler] * 4
    if name == "stable_diffusion":
        others = (EulerAncestralDiscreteScheduler, HeunDiscreteScheduler)
        schedulers[1:3] = [each.from_config(pipe.scheduler.config) for each in others]
    alone = [latents(pipe, schedulers[index], index) for index in range(4)]
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    rendezvous = patient(Rendezvous([denoiser]))
    start, turn, encoding = threading.Barrier(4), threading.Lock(), threading.local()

    def end_encoding(*_: object):
        if encoding.now:
            encoding.now = False
            turn.release()
            start.wait(TIMEOUT_S)

    denoiser.register_forward_pre_hook(end_encoding)

    def run(index: int):
        turn.acquire()
        encoding.now = True
        with rendezvous.member():
            return latents(pipe, schedulers[index], index)

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(run, range(4)))
    for index in range(4):
        scale = alone[index].abs().max()
        assert (made[index] - alone[index]).abs().max() <= 1e-4 * scale
        assert (alone[index] - alone[index - 1]).abs().max() > 1e-2 * scale
    # All four in one forward is usual, and not certain: a busy machine may start one late.
    assert max(rendezvous.histogram) > 1


def test_lists_of_samples_as_many_as_channels_share_a_forward_of_a_real_transformer():
    torch.manual_seed(0)
    transformer = z_image_transformer()
    calls = [
        (
            [torch.randn(16, 1, 4, 4) for _ in range(8)],
            torch.full((8,), 0.3 + 0.2 * index),
            [torch.randn(5 + 7 * index + row, 16) for row in range(8)],
        )
        for index in range(2)
    ]
    start = threading.Barrier(2)

    def run(index: int):
        with rendezvous.member(), torch.inference_mode():
            start.wait(TIMEOUT_S)
            return [transformer(*calls[index], return_dict=False)[0] for _ in range(4)]

    with torch.inference_mode():
        alone = [transformer(*call, return_dict=False)[0] for call in calls]
    rendezvous = patient(Rendezvous([transformer]))
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(run, range(2)))
    for index in range(2):
        for output in made[index]:
            assert len(output) == 8
            for part, expected in zip(output, alone[index], strict=True):
                assert (part - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert rendezvous.histogram[2] >= 1


def test_whoever_waits_to_decode_holds_up_nobody_in_the_loop(
    sharing: Engine, pipe: Any, parameters: MakeParameters
):
    gate, decode, start = Gate(), pipe.vae.decode, threading.Barrier(3)

    def held(*args: Any, **options: Any):
        gate()
        return decode(*args, **options)

    pipe.vae.decode = held
    watchers = [Starter(start) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        running = [
            pool.submit(sharing.generate, parameters(seed=seed, num_inference_steps=steps), watcher)
            for seed, (steps, watcher) in enumerate(zip((3, 5, 9), watchers, strict=True))
        ]
        wait_until(lambda: (9, 9) in watchers[2].calls, TIMEOUT_S / 2, "the end of the longest")
        assert not any(each.done() for each in running)
        gate.open()
        assert [each.result(TIMEOUT_S).steps for each in running] == [3, 5, 9]
