"""The autoencoder at the end of a run: what it decodes at once, and how it saves memory."""

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from configs.parameters import Parameters
from workers.failures import is_out_of_memory, short_cause
from workers.patches import put
from workers.sharing.cost import ForwardCost

_logger = logging.getLogger(__name__)

# Pixels of all outputs together, frames of videos counted.
DECODED_AT_ONCE = 1024 * 1024


class Decoder:
    """The autoencoder of one pipeline, or none; one run at a time decodes.

    Attributes:
        measuring: Whether to look at the memory that it takes.
        peak_bytes: Most that was seen of it, for as many pixels as are decoded at once; 0 on a CPU.
    """

    def __init__(self, vae: Any, on_tiles: Callable[[], None]) -> None:
        """Stand before `decode` of `vae`; `on_tiles` is called where it had to decode in tiles."""
        self._vae = vae
        self._dtype = _dtype(vae)
        # None where it has no such switch, True where the stage has switched it on.
        self._slicing = getattr(vae, "use_slicing", None)
        self._tiling = getattr(vae, "use_tiling", None)
        self._on_tiles = on_tiles
        self._put_back: Callable[[], None] | None = None
        self._pixels = DECODED_AT_ONCE
        self.measuring = False
        self.peak_bytes = 0
        if callable(getattr(vae, "decode", None)):
            put(vae, "decode", self._within_memory(vae.decode), over=True)

    def prepare(self, asked: Parameters, outputs: int) -> None:
        """Get ready for so many outputs: large ones are decoded one by one.

        So the memory is that of one, and each has the rounding that it has alone.
        """
        self.restore()
        self._pixels = asked.width * asked.height * (asked.num_frames or 1)
        if outputs > 1 and outputs * self._pixels > DECODED_AT_ONCE and self._slicing is False:
            self._vae.use_slicing = True

    def keep_rows(self, chosen: Sequence[int], total: int, on_kept: Callable[[], None]) -> None:
        """Have the `chosen` of `total` rows decoded only, and `on_kept` called once that is so.

        They cannot be told apart where the autoencoder gets other rows, such as frames; all are
        decoded then.
        """
        if self._vae is None:
            return
        decode = self._vae.decode

        def choose(value: Any) -> Any:
            if torch.is_tensor(value) and value.ndim and len(value) == total:
                return value[torch.tensor(chosen, device=value.device)]
            return value

        @functools.wraps(decode)
        def decode_kept(latents: Any, *args: Any, **options: Any) -> Any:
            if not torch.is_tensor(latents) or len(latents) != total:
                return decode(latents, *args, **options)
            on_kept()
            args = tuple(choose(each) for each in args)
            options = {name: choose(each) for name, each in options.items()}
            return decode(choose(latents), *args, **options)

        self._put_back = put(self._vae, "decode", decode_kept, over=True)

    def restore(self) -> None:
        """Undo what was done for one run."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        if self._slicing is False:
            self._vae.use_slicing = False
        if self._tiling is False:
            self._vae.use_tiling = False

    def undo_upcast(self) -> None:
        """Undo the upcast of a pipeline that an error left in place (SDXL)."""
        if self._vae is not None and _dtype(self._vae) != self._dtype:
            self._vae.to(dtype=self._dtype)

    def _within_memory(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        """Return `decode`, tried again one by one and then in tiles where the memory is too small.

        A request has paid all its steps by then.
        """

        @functools.wraps(decode)
        def decode_within_memory(latents: Any, *args: Any, **options: Any) -> Any:
            ways = self._ways_left(latents)
            while True:
                try:
                    return self._measured(decode, latents, *args, **options)
                except Exception as error:
                    if not ways or not is_out_of_memory(error):
                        raise
                    failure = short_cause(error)
                # Out here, where no traceback holds the memory of that try any more.
                gc.collect()
                torch.cuda.empty_cache()
                how, switch = ways.pop(0)
                _logger.warning("too little memory to decode, once more %s: %s", how, failure)
                switch()

        return decode_within_memory

    def _ways_left(self, latents: Any) -> list[tuple[str, Callable[[], None]]]:
        """Return ways that take less memory, the one that changes nothing in the picture first."""
        ways: list[tuple[str, Callable[[], None]]] = []
        several = torch.is_tensor(latents) and len(latents) > 1
        if several and self._slicing is False and not self._vae.use_slicing:
            ways.append(("one by one", self._slice))
        if self._tiling is False and not self._vae.use_tiling:
            ways.append(("in tiles", self._tile))
        return ways

    def _slice(self) -> None:
        self._vae.use_slicing = True

    def _tile(self) -> None:
        self._vae.enable_tiling()
        self._on_tiles()

    def _measured(self, decode: Callable[..., Any], *args: Any, **options: Any) -> Any:
        latents = args[0]
        if not self.measuring or not torch.is_tensor(latents):
            return decode(*args, **options)
        with ForwardCost(latents.device) as cost:
            output = decode(*args, **options)
        at_once = max(DECODED_AT_ONCE // self._pixels, 1)
        self.peak_bytes = max(self.peak_bytes, at_once * (cost.peak_bytes or 0))
        return output


def _dtype(vae: Any) -> torch.dtype | None:
    # `vae.dtype` walks through all parts each time.
    first = None if vae is None else next(vae.parameters(), None)
    return None if first is None else first.dtype
