"""What does not fit the dtype of the model is made once more in float32, beside nobody."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from configs.errors import DeviceLost, NonFiniteOutput
from tests.engine.conftest import MakeParameters, plan
from tests.engine.recorder import Recorder
from tests.waiting import wait_until
from workers.devices.chunk import DeviceChunk
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted

HALVES = ("float16", "bfloat16")
WAIT_S = 60.0


def _overflow(pipe: Any) -> None:
    """Make the first residual block overflow in float16; its norm undoes the scale in float32."""
    with torch.no_grad():
        pipe.unet.down_blocks[0].resnets[0].conv1.weight.mul_(1e4)


def _spoil(pipe: Any, dtypes: tuple[torch.dtype, ...], width: int = 64) -> None:
    """Make the denoiser give NaN for latents of one width and for some types."""
    wide = width // pipe.vae_scale_factor

    def spoil(_module: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if arguments[0].dtype in dtypes and arguments[0].shape[-1] == wide:
            return output * float("nan")
        return output

    pipe.unet.conv_in.register_forward_hook(spoil)


def _engine(dtype: str, change: Callable[[Any], None], **options: Any) -> Engine:
    pipe = load_pipeline(plan(dtype=dtype))
    change(pipe)
    return Engine(pipe, inspect_abilities(pipe, {}), **options)


def _weights(engine: Engine) -> list[torch.Tensor]:
    pipe = engine.pipe
    return [
        tensor.clone()
        for part in (pipe.unet, pipe.vae, pipe.text_encoder)
        for tensor in part.state_dict().values()
    ]


def test_an_overflow_in_float16_is_made_in_float32_and_says_so(
    parameters: MakeParameters, caplog: pytest.LogCaptureFixture
):
    engine = _engine("float16", _overflow)
    before = _weights(engine)
    recorder = Recorder()
    made = engine.generate(parameters(), recorder)
    assert [warning for warning in made.warnings if "made in float32" in warning]
    assert "once more in float32" in caplog.text
    steps = [step for step, _ in recorder.calls]
    assert steps.count(6) >= 2  # it ran through twice

    full = load_pipeline(plan(dtype="float16"))
    _overflow(full)
    for part in (full.unet, full.vae, full.text_encoder):
        part.to(torch.float32)
    reference = Engine(full, inspect_abilities(full, {})).generate(parameters(), Recorder())
    assert not reference.warnings
    assert made.images[0].tobytes() == reference.images[0].tobytes()

    after = _weights(engine)
    assert [tensor.dtype for tensor in after] == [tensor.dtype for tensor in before]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_fits_stays_in_the_dtype_of_the_model(parameters: MakeParameters, dtype: str):
    engine = _engine(dtype, lambda pipe: _spoil(pipe, (torch.float16, torch.bfloat16)))
    first = engine.generate(parameters(width=72), Recorder())
    assert first.warnings == ()
    spoilt = engine.generate(parameters(), Recorder())
    assert len(spoilt.warnings) == 1
    again = engine.generate(parameters(width=72), Recorder())
    assert again.warnings == ()
    assert again.images[0].tobytes() == first.images[0].tobytes()


def test_what_is_no_number_in_float32_either_fails(parameters: MakeParameters):
    every = (torch.float16, torch.bfloat16, torch.float32)
    engine = _engine("float16", lambda pipe: _spoil(pipe, every))
    with pytest.raises(NonFiniteOutput, match=r"in float32 too"):
        engine.generate(parameters(), Recorder())
    assert engine.generate(parameters(width=72), Recorder()).images


def test_infinity_from_a_decoder_is_seen_though_pixels_are_clamped(parameters: MakeParameters):
    def overflow(pipe: Any) -> None:
        with torch.no_grad():
            pipe.vae.decoder.layers[-1].bias.fill_(float("inf"))

    engine = _engine("float16", overflow)
    with pytest.raises(NonFiniteOutput, match="the autoencoder gave NaN"):
        engine.generate(parameters(), Recorder())


def test_a_decoder_is_raised_as_a_denoiser_is(parameters: MakeParameters):
    def overflow(pipe: Any) -> None:
        with torch.no_grad():
            pipe.vae.decoder.layers[0].weight.mul_(5e4)

    made = _engine("float16", overflow).generate(parameters(), Recorder())
    assert [warning for warning in made.warnings if "made in float32" in warning]


def test_too_little_memory_for_float32_is_told_and_the_weights_are_as_before(
    parameters: MakeParameters, caplog: pytest.LogCaptureFixture
):
    def scarce(pipe: Any) -> None:
        _spoil(pipe, (torch.float16,))

        def refuse(_module: Any, arguments: tuple[Any, ...]) -> None:
            if arguments[0].dtype == torch.float32:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        pipe.unet.conv_in.register_forward_pre_hook(refuse)

    engine = _engine("float16", scarce)
    before = _weights(engine)
    with pytest.raises(NonFiniteOutput, match=r"a run in float32 failed: OutOfMemoryError"):
        engine.generate(parameters(), Recorder())
    assert all(torch.equal(a, b) for a, b in zip(_weights(engine), before, strict=True))
    assert engine.generate(parameters(width=72), Recorder()).images


class _Held(Recorder):
    """Stays at a step until it is let go; notes that it got there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self.there, self.go = threading.Event(), threading.Event()

    def on_step(self, step: int, steps: int) -> None:
        super().on_step(step, steps)
        if step == self._at:
            self.there.set()
            assert self.go.wait(WAIT_S)


class _Stoppable(Recorder):
    """Ends the run once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()

    def on_step(self, step: int, steps: int) -> None:
        super().on_step(step, steps)
        if self.stop.is_set():
            raise Interrupted("canceled")


def test_a_run_in_float32_waits_for_its_neighbours_and_they_never_see_it(
    parameters: MakeParameters, caplog: pytest.LogCaptureFixture
):
    engine = _engine("float16", lambda pipe: _spoil(pipe, (torch.float16,)), max_num_seqs=4)
    caplog.set_level(logging.WARNING)
    asked = parameters(width=72, deterministic=True)
    reference = engine.generate(asked, Recorder()).images[0].tobytes()
    made: dict[str, Any] = {}

    def run(name: str, what: Any, progress: Recorder) -> threading.Thread:
        def work() -> None:
            try:
                made[name] = engine.generate(what, progress)
            except Interrupted:
                made[name] = None

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    neighbour, spoilt, canceled = _Held(at=2), Recorder(), _Stoppable()
    threads = [run("neighbour", asked, neighbour)]
    assert neighbour.there.wait(WAIT_S)
    threads.append(run("spoilt", parameters(), spoilt))
    wait_until(lambda: "once more in float32" in caplog.text, WAIT_S, "the first try to fail")
    waited = len(spoilt.calls)
    wait_until(lambda: len(spoilt.calls) > waited + 1, WAIT_S, "it to say that it waits")
    threads.append(run("canceled", parameters(), canceled))
    threads.append(run("late", asked, Recorder()))
    canceled.stop.set()
    wait_until(lambda: "canceled" in made, WAIT_S, "the waiting one to be canceled")
    assert "spoilt" not in made
    assert "late" not in made
    neighbour.go.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert made["spoilt"].warnings
    for name in ("neighbour", "late"):
        assert made[name].warnings == ()
        assert made[name].images[0].tobytes() == reference


def test_weights_that_cannot_be_changed_are_left_as_they_are(parameters: MakeParameters):
    engine = _engine("float16", lambda pipe: _spoil(pipe, (torch.float16,)))
    engine.pipe.unet.register_buffer("elsewhere", torch.empty(1, device="meta"))
    with pytest.raises(NonFiniteOutput, match=r"the denoiser gave NaN or infinity; another"):
        engine.generate(parameters(), Recorder())


class _Halves(DeviceChunk):
    """A chunk whose kernels take no float32."""

    supports_float32 = False


def test_devices_whose_kernels_take_no_float32_are_not_asked_to(parameters: MakeParameters):
    engine = _engine("float16", lambda pipe: _spoil(pipe, (torch.float16,)), chunk=_Halves())
    with pytest.raises(NonFiniteOutput, match=r"the denoiser gave NaN or infinity; another"):
        engine.generate(parameters(), Recorder())


def test_a_device_that_is_lost_in_float32_is_no_bad_output(parameters: MakeParameters):
    def lose(pipe: Any) -> None:
        _spoil(pipe, (torch.float16,))

        def fail(_module: Any, arguments: tuple[Any, ...]) -> None:
            if arguments[0].dtype == torch.float32:
                raise DeviceLost("rank 1 of 2 ended with exit code 1")

        pipe.unet.conv_in.register_forward_pre_hook(fail)

    engine = _engine("float16", lose)
    with pytest.raises(DeviceLost, match="rank 1"):
        engine.generate(parameters(), Recorder())
