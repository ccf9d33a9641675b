"""The guidance of a run, which its requests may change between two steps.

A pipeline gets its scales as numbers that change under it (``workers.engine.running_scale``). Where
a distilled model reads the scale itself, as the `guidance` argument of the denoiser, that argument
is replaced at the call. Requests that share a pipeline call have scales of their own, where the
pipeline treats its samples in one batch; one for which that is not so begins anew by itself. A
change that the pipeline turns out not to read is said in the answer. Knows no family.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workers.engine.output_rows import OutputRows
from workers.engine.pipeline_arguments import arguments_of, default_of
from workers.engine.running_scale import RunningScale
from workers.engine.seat import Seat

_NAMES = ("guidance_scale", "true_cfg_scale")
# These get the scale as it is; others a multiple of it (HunyuanVideo 1000, Sana Sprint 0.1).
_PLAIN_GUIDANCE = frozenset(
    ("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel")
)
# bfloat16 rounds by 0.4 %, twice.
_ROUNDING = 0.01


class RunningGuidance:
    """The scales of one pipeline call."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        """Let `seats`, in the order of their samples, change what they asked for."""
        self._seats = seats
        self._rows = OutputRows(seats)
        self._scales: dict[str, RunningScale] = {}
        self._defaults: dict[str, float] = {}
        self._kept: set[str] = set()
        self._steered: set[int] = set()
        # By request and scale: the value before and the one wanted, until it is seen to be read.
        self._unproven: dict[tuple[int, str], tuple[float, float]] = {}
        self._refused: dict[tuple[int, str], float] = {}
        self._factor: float | None = None

    def watched(self, arguments: Mapping[str, Any], pipeline_class: Any) -> dict[str, Any]:
        """Return the arguments of the pipeline's call with scales that can be changed."""
        taken = arguments_of(pipeline_class)
        for name in _NAMES:
            default = default_of(taken, name)
            if isinstance(default, (int, float)):
                self._defaults[name] = default
            value = arguments.get(name, default)
            if name in taken and isinstance(value, (int, float)):
                self._scales[name] = RunningScale(value, self._rows.total)
        return {**arguments, **self._scales}

    def enter_loop(self) -> None:
        """Note that the first step begins: what was computed of a scale so far will stay."""
        self._kept = {name for name, scale in self._scales.items() if scale.used}

    def at_boundary(
        self, step: int, present: Sequence[bool], samples: torch.Tensor | None, *, over: bool
    ) -> None:
        """See what became of the changes of the last step, and take those for the next.

        Of the requests that are `present`. `over` says that there is no next one. Where a request
        can not change as the others stay, it is sent away to begin anew.
        """
        for (index, name), (before, wanted) in self._unproven.items():
            if present[index] and not self._scales[name].used:
                self._set(index, name, before)
                self._refuse(index, name, wanted)
        self._unproven.clear()
        for name, scale in self._scales.items():
            if scale.divided:
                for index, seat in enumerate(self._seats):
                    if present[index] and self._value(index, name) != scale.first:
                        self._set(index, name, scale.first)
                        seat.run_by_itself()
            scale.used = scale.divided = False
            scale.samples = None if samples is None else samples.shape
        for index, seat in enumerate(self._seats):
            if present[index] and not seat.ended:
                self._hear(index, step, over=over)

    def steered_call(self, denoiser: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a denoiser call's arguments with the guidance of now; None to leave them."""
        scale, guidance = self._scales.get("guidance_scale"), kwargs.get("guidance")
        if scale is None or not torch.is_tensor(guidance):
            return None
        if not self._unproven and scale.alike and scale.values[0] == scale.first:
            return None
        factor = self._factor_of(guidance, scale.first, type(denoiser).__name__)
        if factor is None:
            return None
        if scale.alike:
            steered = torch.full_like(guidance, scale.values[0])
        elif guidance.ndim == 1 and len(guidance) % len(scale.values) == 0:
            repeats = len(guidance) // len(scale.values)
            steered = guidance.new_tensor(scale.values * repeats)
        else:
            scale.used = scale.divided = True
            return None
        scale.used = True
        return {**kwargs, "guidance": steered if factor == 1 else steered * factor}

    def _factor_of(self, guidance: torch.Tensor, first: float, denoiser: str) -> float | None:
        """What the pipeline multiplies the scale by for the denoiser; None where it does not show.

        Only powers of ten are taken for one: the argument may be of another scale.
        """
        if denoiser in _PLAIN_GUIDANCE:
            return 1.0
        if self._factor is None and first > 0:
            ratio = guidance.flatten()[0].item() / first
            powers = (10.0**exponent for exponent in range(-3, 4))
            fitting = [each for each in powers if abs(ratio / each - 1) < _ROUNDING]
            self._factor = fitting[0] if fitting else None
        return self._factor

    def _hear(self, index: int, step: int, *, over: bool) -> None:
        seat = self._seats[index]
        for name, wish in seat.wanted_guidance(step).items():
            scale = self._scales.get(name)
            wanted = self._defaults.get(name) if wish is None else wish
            if wanted is None or self._refused.get((index, name)) == wanted:
                continue
            if scale is None or over or name in self._kept or not scale.can_become(wanted):
                if scale is None or self._value(index, name) != wanted:
                    self._refuse(index, name, wanted)
            elif self._value(index, name) != wanted:
                self._unproven[index, name] = self._value(index, name), wanted
                self._set(index, name, wanted)
                if index not in self._steered:  # should it begin anew, it is to change here
                    self._steered.add(index)
                    seat.steer_from = step

    def _value(self, index: int, name: str) -> float:
        return self._scales[name].values[self._rows.of(self._seats[index])][0]

    def _set(self, index: int, name: str, value: float) -> None:
        seat = self._seats[index]
        self._scales[name].values[self._rows.of(seat)] = [value] * seat.outputs

    def _refuse(self, index: int, name: str, wanted: float) -> None:
        self._refused[index, name] = wanted
        warning = f"{name} could not be changed to {wanted:g} while running"
        if warning not in self._seats[index].warnings:
            self._seats[index].warnings.append(warning)
