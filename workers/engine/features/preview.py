"""Small pictures of a run that is under way, from its latents, without the autoencoder.

Latents and pixels of an autoencoder are close to linear in each other, cell by cell. The map is
fitted by least squares to what this model itself made, so that no family needs a table of its own.
"""

import threading
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from PIL import Image

from configs.parameters import Abilities
from workers.engine.run import Feature, Parts, Run, Slot

_PICTURES = 16


_KEPT = 0.8  # weight of what was learnt before against one more picture


_RIDGE = 1e-4


_TOKENS, _PICTURE, _FRAMES = 2, 3, 4  # dimensions of one sample


_SMALLEST, _LARGEST = 64, 256  # pixels of the longer side


class Preview(Feature):
    """Learns from finished pictures how latents look; thread-safe."""

    def __init__(self, cell: int) -> None:
        """Know nothing yet; a token of latents that come as tokens is `cell` x `cell` pixels."""
        self._cell = cell
        self._lock = threading.Lock()
        self._learnt = 0
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        self._weights: torch.Tensor | None = None
        self._spread = 1.0

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """Return one that knows nothing yet; it learns from the warm-up."""
        return cls(parts.abilities.size_multiple)

    def offers(self, abilities: Abilities) -> Abilities:
        """Offer previews once there is something to show."""
        return replace(abilities, preview=self.ready)

    def show(self, run: Run, slot: Slot) -> None:
        """Show how the first output of a request looks, where its latents tell."""
        latents = run.latents_of(slot)
        if latents is None:
            return
        shown = self.render(latents, slot.parameters.width, slot.parameters.height)
        if shown is not None:
            slot.progress.on_preview(run.step, shown)

    def after_call(self, run: Run, slot: Slot, output: Image.Image) -> None:
        """Learn from the first few runs."""
        if self._learnt < _PICTURES:
            latents = run.latents_of(slot)
            if latents is not None:
                self.learn(latents, output)

    @property
    def ready(self) -> bool:
        """Whether pictures can be shown."""
        return self._weights is not None

    def learn(self, latents: torch.Tensor, picture: Image.Image) -> None:
        """Take the latents of a finished run and the picture that the autoencoder made of them.

        Latents are `[n, channels, rows, columns]`, the same with frames before the rows, or
        `[n, tokens, channels]`, row by row; of others, nothing is learnt.
        """
        cells = self._cells(latents, *picture.size)
        if cells is None or not bool(torch.isfinite(cells).all()):
            return
        rows, columns, _ = cells.shape
        small = picture.convert("RGB").resize((columns, rows), Image.Resampling.BOX)
        pixels = torch.from_numpy(np.array(small)).double().reshape(-1, 3) / 255
        given = _with_constant(cells)
        outer, mixed = given.T @ given / len(given), given.T @ pixels / len(given)
        with self._lock:
            self._learnt += 1
            if self._moments is not None and self._moments[0].shape == outer.shape:
                outer = _KEPT * self._moments[0] + (1 - _KEPT) * outer
                mixed = _KEPT * self._moments[1] + (1 - _KEPT) * mixed
            self._moments = outer, mixed
            ridge = _RIDGE * torch.eye(len(outer), dtype=outer.dtype) * outer.diagonal().mean()
            self._weights = torch.linalg.solve(outer + ridge, mixed)
            self._spread = float(cells.std())

    def render(self, latents: torch.Tensor, width: int, height: int) -> Image.Image | None:
        """Return how the first of the latents look, for an output of `width` x `height` pixels.

        None as long as nothing was learnt, and for latents of another layout. Of a video it is the
        frame in the middle. While there is mostly noise, it is scaled down to the spread of
        finished latents.
        """
        weights = self._weights
        cells = None if weights is None else self._cells(latents, width, height, middle=True)
        if weights is None or cells is None or cells.shape[-1] + 1 != len(weights):
            return None
        rows, columns, _ = cells.shape
        cells = cells / max(float(cells.std()) / self._spread, 1.0)
        pixels = (_with_constant(cells) @ weights).clamp(0, 1).mul(255).round()
        small = Image.fromarray(pixels.reshape(rows, columns, 3).to(torch.uint8).numpy())
        scale = min(max(_SMALLEST, *small.size), _LARGEST) / max(small.size)
        size = (max(round(columns * scale), 1), max(round(rows * scale), 1))
        return small.resize(size, Image.Resampling.BICUBIC)

    def _cells(
        self, latents: torch.Tensor, width: int, height: int, *, middle: bool = False
    ) -> torch.Tensor | None:
        """The first sample as `[rows, columns, channels]` on the CPU; None for another layout."""
        first = latents[0].detach()
        if first.ndim == _FRAMES:
            first = first[:, first.shape[1] // 2 if middle else 0]
        if first.ndim == _PICTURE:
            return _on_host(first).permute(1, 2, 0)
        rows, columns = height // self._cell, width // self._cell
        each = rows * columns
        if first.ndim != _TOKENS or not each or len(first) % each:
            return None
        start = len(first) // each // 2 * each if middle else 0
        return _on_host(first[start : start + each]).reshape(rows, columns, -1)


def _on_host(picked: torch.Tensor) -> torch.Tensor:
    return picked.to("cpu").double()


def _with_constant(cells: torch.Tensor) -> torch.Tensor:
    flat = cells.reshape(-1, cells.shape[-1])
    return torch.cat([flat, torch.ones(len(flat), 1, dtype=flat.dtype)], dim=1)
