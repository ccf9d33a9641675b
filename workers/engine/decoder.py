"""The autoencoder as it decodes: what a run changes of it, and how that is undone.

Used by the run whose turn it is. Knows no pipelines.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from workers.engine.output_rows import OutputRows
from workers.engine.seat import Seat

# Pixels of all outputs together.
_DECODED_AT_ONCE = 1024 * 1024


class Decoder:
    """The autoencoder of one pipeline, or none."""

    def __init__(self, vae: Any) -> None:
        """Remember how it is."""
        self._vae = vae
        self._dtype = _dtype(vae)
        self._slicing = getattr(vae, "use_slicing", None)
        self._whole: dict[str, Any] | None = None

    def prepare(self, rows: OutputRows, kept: Sequence[Seat]) -> None:
        """Have those decoded that are `kept` among the requests of `rows`, which it tells if so.

        They can not be told apart where the autoencoder gets other rows, such as frames; all are
        decoded then. Large outputs of several requests are decoded one by one: memory as for one
        alone.
        """
        asked = rows.seats[0].parameters
        outputs = sum(seat.outputs for seat in kept)
        pixels = outputs * asked.width * asked.height * (asked.num_frames or 1)
        if len(rows.seats) > 1 and pixels > _DECODED_AT_ONCE and self._slicing is False:
            self._vae.use_slicing = True
        if self._vae is not None and len(kept) < len(rows.seats):
            self._leave_out(rows, kept)

    def restore(self) -> None:
        """Undo :meth:`prepare`, and an upcast of a pipeline that an error left in place (SDXL)."""
        if self._vae is None:
            return
        if self._whole is not None:
            vars(self._vae).pop("decode")
            vars(self._vae).update(self._whole)
            self._whole = None
        if self._slicing is False:
            self._vae.use_slicing = False
        if _dtype(self._vae) != self._dtype:
            self._vae.to(dtype=self._dtype)

    def _leave_out(self, rows: OutputRows, kept: Sequence[Seat]) -> None:
        decode, chosen, total = self._vae.decode, rows.of_all(kept), rows.total

        def choose(value: Any) -> Any:
            if torch.is_tensor(value) and value.ndim and len(value) == total:
                return value[torch.tensor(chosen, device=value.device)]
            return value

        @functools.wraps(decode)
        def decode_kept(latents: Any, *args: Any, **options: Any) -> Any:
            if not torch.is_tensor(latents) or len(latents) != total:
                return decode(latents, *args, **options)
            rows.keep(kept)
            args = tuple(choose(each) for each in args)
            options = {name: choose(each) for name, each in options.items()}
            return decode(choose(latents), *args, **options)

        own = vars(self._vae)
        self._whole = {"decode": own["decode"]} if "decode" in own else {}
        own["decode"] = decode_kept


def _dtype(vae: Any) -> torch.dtype | None:
    # `vae.dtype` walks through all parts each time.
    first = None if vae is None else next(vae.parameters(), None)
    return None if first is None else first.dtype
