"""What becomes of a run whose pipeline fails, and of the engine after it."""

import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

from configs.errors import (
    DeviceLost,
    GenerationFailed,
    NonFiniteOutput,
    OutOfMemory,
    StoreUnavailable,
)
from configs.settings import REPOSITORY
from tests.engine.conftest import MakeParameters, count_decodes
from tests.engine.recorder import Recorder
from workers.engine.engine import Engine


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), DeviceLost),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory),
        (ValueError("no such word: CUDA error, device-side assert"), GenerationFailed),
    ],
)
def test_a_lost_device_is_told_from_an_error_of_the_run(
    own_engine: Engine,
    pipe: Any,
    parameters: MakeParameters,
    error: Exception,
    expected: type[Exception],
):
    def fail(*_: object) -> None:
        raise error

    pipe.unet.register_forward_hook(fail)
    with pytest.raises(expected):
        own_engine.generate(parameters(), Recorder())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_poisoned_cuda_context_is_found_by_asking_the_device():
    """In a process of its own, which can use its device no more afterwards."""
    script = (
        "import torch\n"
        "from workers.failures import is_device_lost\n"
        "assert not is_device_lost(ValueError('a bad size'), 'cuda')\n"
        "try:\n"
        "    torch.zeros(2, device='cuda')[torch.tensor([7], device='cuda')].cpu()\n"
        "except Exception as error:\n"
        "    assert is_device_lost(error, 'cuda')\n"
        "    assert is_device_lost(TypeError('whatever comes next'), 'cuda')\n"
        "else:\n"
        "    raise AssertionError('the assert on the device did not come')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
