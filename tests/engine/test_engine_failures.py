"""What becomes of a run whose pipeline fails, and of the engine after it."""

import weakref
from typing import Any

import pytest
import torch

from configs.errors import GenerationFailed, NonFiniteOutput, OutOfMemory, StoreUnavailable
from tests.engine.conftest import MakeParameters, count_decodes
from tests.engine.recorder import Recorder
from workers.engine import Engine


def test_non_finite_latents_are_an_error_and_no_black_picture(
    own_engine: Engine, pipe: Any, parameters: MakeParameters
):
    decodes = count_decodes(pipe)
    with pytest.raises(NonFiniteOutput, match="denoiser gave NaN"):
        own_engine.generate(parameters(guidance_scale=1e38), Recorder())
    assert decodes == []


def test_a_non_finite_image_is_an_error(own_engine: Engine, pipe: Any, parameters: MakeParameters):
    next(pipe.vae.decoder.parameters()).data.fill_(float("nan"))
    with pytest.raises(NonFiniteOutput, match="autoencoder gave NaN"):
        own_engine.generate(parameters(), Recorder())


def test_an_error_of_the_pipeline_is_told_in_short(
    engine: Engine, parameters: MakeParameters, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(GenerationFailed) as caught:
        engine.generate(parameters(width=60), Recorder())
    assert caught.value.message.startswith("the pipeline failed: ValueError: `height` and `width`")
    assert "\n" not in caught.value.message
    assert "Traceback" in caplog.text
    engine.generate(parameters(), Recorder())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 GiB"),
        (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        (MemoryError, ""),
    ],
)
def test_too_little_memory_is_told_and_freed(
    own_engine: Engine, pipe: Any, parameters: MakeParameters, kind: type[Exception], text: str
):
    alive = []

    def fail(*_: object) -> None:
        held = torch.zeros(1000)
        alive.append(weakref.ref(held))
        raise kind(text)

    hook = pipe.unet.register_forward_hook(fail)
    with pytest.raises(OutOfMemory, match="2 x 64x64; ask for a smaller size"):
        own_engine.generate(parameters(num_outputs_per_prompt=2), Recorder())
    assert alive[0]() is None
    hook.remove()
    own_engine.generate(parameters(), Recorder())


def test_an_error_of_the_observer_stays_what_it_is(engine: Engine, parameters: MakeParameters):
    class Broken(Recorder):
        def on_step(self, step: int, steps: int) -> None:
            raise StoreUnavailable("Redis is away")

    with pytest.raises(StoreUnavailable):
        engine.generate(parameters(), Broken())
