"""Requests of one engine that wait together, so that they can start as one pipeline call."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from configs.parameters import Parameters
from configs.stage_config import PipelineSettings
from scripts.lab.family_trial import pixels
from tests.engine.recorder import Recorder
from tests.engine.toy_denoiser import Gate
from tests.waiting import wait_until
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine, Generation
from workers.engine.progress import Interrupted
from workers.sharing.call import BatchStats

TIMEOUT_S = 60


class Batches:
    """An engine and threads whose requests all wait while the turn is held by another."""

    def __init__(self, pipe: Any, **defaults: Any) -> None:
        self.pipe = pipe
        settings = PipelineSettings(enable_prompt_embed_cache=False)  # so that encodings count
        self.engine = Engine(pipe, inspect_abilities(pipe, defaults), settings, max_num_seqs=8)
        self.engine.warm_up()
        self.pool = ThreadPoolExecutor(9)
        self.encoded: list[int] = []
        self.decoded: list[int] = []
        self._made: dict[Any, Generation] = {}
        encode, decode = pipe.text_encoder.forward, pipe.vae.decode

        def encoding(input_ids: torch.Tensor, *args: Any, **options: Any):
            self.encoded.append(len(input_ids))
            return encode(input_ids, *args, **options)

        def decoding(latents: torch.Tensor, *args: Any, **options: Any):
            self.decoded.append(len(latents))
            return decode(latents, *args, **options)

        pipe.text_encoder.forward, pipe.vae.decode = encoding, decoding

    def start(
        self,
        asked: Sequence[Parameters],
        watchers: Sequence[Any],
        inputs: Sequence[Inputs] | None = None,
    ) -> list[Future[Generation]]:
        """Have all requests wait for the turn, in their order, and then let them go."""
        inputs = inputs or [Inputs()] * len(asked)
        gate = Gate()

        class Holder(Recorder):
            def on_step(self, step: int, steps: int) -> None:
                gate()
                raise Interrupted("it only held the turn")

        holder = self.pool.submit(self.engine.generate, asked[0], Holder(), inputs[0])
        assert gate.reached.wait(TIMEOUT_S)
        started = []
        for number, request in enumerate(zip(asked, watchers, inputs, strict=True), start=1):
            started.append(self.pool.submit(self.engine.generate, *request))
            wait_until(partial(self._wait_as, number), TIMEOUT_S, "the queue")
        gate.open()
        with pytest.raises(Interrupted):
            holder.result(TIMEOUT_S)
        return started

    def _wait_as(self, number: int) -> bool:
        return self.engine.requests_waiting == number

    def count_rows(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return a list to which the rows of each forward of the denoiser are added from now on."""
        rows: list[int] = []
        forward = self.pipe.unet.conv_in.forward

        def counted(sample: torch.Tensor):
            rows.append(len(sample))
            return forward(sample)

        monkeypatch.setattr(self.pipe.unet.conv_in, "forward", counted)
        monkeypatch.setattr(BatchStats, "doubts", lambda *_: False)  # which would count rows again
        return rows

    def spoil(self, monkeypatch: pytest.MonkeyPatch, row: int, of: int) -> None:
        """Have one row be NaN in the latents of a start of so many rows."""
        prepare = self.pipe.prepare_latents

        def spoiling(*args: Any, **options: Any):
            latents = prepare(*args, **options)
            if len(latents) == of:
                latents[row] = torch.nan
            return latents

        monkeypatch.setitem(vars(self.pipe), "prepare_latents", spoiling)  # copies have it too

    def alone(
        self, asked: Sequence[Parameters], inputs: Sequence[Inputs] | None = None
    ) -> list[Generation]:
        """What each makes with nothing beside it, made once."""
        inputs = inputs or [Inputs()] * len(asked)
        made = [self._made_once(*each) for each in zip(asked, inputs, strict=True)]
        self.encoded.clear()
        self.decoded.clear()
        return made

    def _made_once(self, asked: Parameters, inputs: Inputs) -> Generation:
        images = (*inputs.images, inputs.mask)
        key = asked, tuple(None if each is None else (each.size, each.tobytes()) for each in images)
        if key not in self._made:
            self._made[key] = self.engine.generate(asked, Recorder(), inputs)
        return self._made[key]


class Canceler(Recorder):
    """Stops once so many steps are done."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def on_step(self, step: int, steps: int) -> None:
        super().on_step(step, steps)
        if step == self._at:
            raise Interrupted("canceled")


class Last(Recorder):
    """Does something once the last step is done."""

    def __init__(self, at_the_end: Callable[[], None]) -> None:
        super().__init__()
        self._at_the_end = at_the_end

    def on_step(self, step: int, steps: int) -> None:
        super().on_step(step, steps)
        if step == steps:
            self._at_the_end()


def difference(one: Generation, other: Generation) -> int:
    """The largest between pixels of two generations, from 0 to 255."""
    assert one.seeds == other.seeds
    outputs = range(len(one.seeds))
    return max(int(np.abs(pixels(one, k) - pixels(other, k)).max()) for k in outputs)
