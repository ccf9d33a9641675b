"""The autoencoder as it decodes: what a run changes of it, and how that is undone.

Used by the run whose turn it is. Knows no pipelines.
"""

from collections.abc import Sequence
from typing import Any

import torch

from workers.seat import Seat

# Pixels of all outputs together.
_DECODED_AT_ONCE = 1024 * 1024


class Decoder:
    """The autoencoder of one pipeline, or none."""

    def __init__(self, vae: Any) -> None:
        """Remember how it is."""
        self._vae = vae
        self._dtype = _dtype(vae)
        self._slicing = getattr(vae, "use_slicing", None)

    def prepare(self, seats: Sequence[Seat]) -> None:
        """Have large outputs of several requests decoded one by one: memory as for one alone."""
        asked = seats[0].parameters
        pixels = len(seats) * asked.width * asked.height * (asked.num_frames or 1)
        if len(seats) > 1 and pixels > _DECODED_AT_ONCE and self._slicing is False:
            self._vae.use_slicing = True

    def restore(self) -> None:
        """Undo :meth:`prepare`, and an upcast of a pipeline that an error left in place (SDXL)."""
        if self._vae is None:
            return
        if self._slicing is False:
            self._vae.use_slicing = False
        if _dtype(self._vae) != self._dtype:
            self._vae.to(dtype=self._dtype)


def _dtype(vae: Any) -> torch.dtype | None:
    # `vae.dtype` walks through all parts each time.
    first = None if vae is None else next(vae.parameters(), None)
    return None if first is None else first.dtype
