"""One call of a denoiser by one pipeline: what it is like, its rows, and what became of it."""

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workers.sharing.argument_rules import (
    BY_FRAME,
    BY_SECOND,
    LAYERS,
    POSITION_ROWS,
    SHARED,
    TIMES,
)
from workers.sharing.merging import Arguments, Layout, Unmergeable, layout
from workers.sharing.stats import BatchStats

_logger = logging.getLogger(__name__)


_PLAIN = (type(None), bool, int, float, str, torch.dtype)


class LayoutMemory:
    """Remembers one layout; used in one thread."""

    def __init__(self) -> None:
        """Remember none."""
        self._look: Hashable = None
        self._layout: Layout | None = None

    def layout(self, arguments: Mapping[str, Any], make: Callable[[Any], Layout]) -> Layout:
        """Return the layout of a call: that of the last if it looks like it, else one by `make`.

        Raises what `make` raises.
        """
        look = _look(arguments)
        if self._layout is None or look is None or look != self._look:
            self._layout = None
            self._layout, self._look = make(arguments), look
        return self._layout


def _look(value: Any) -> Hashable:
    """All that a layout can depend on; None where that is more than can be told here."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        looks = [_look(item) for item in value.values()]
        return None if None in looks else (*value, *looks)
    if isinstance(value, (list, tuple)):
        looks = [_look(item) for item in value]
        return None if None in looks else (type(value), *looks)
    return None


class Bell:
    """Wakes one thread; rung before it waits, it does not wait."""

    def __init__(self) -> None:
        """Not rung yet."""
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread; ringing twice is ringing once. Under the rendezvous' lock."""
        if self._silence.locked():
            self._silence.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait to be rung, so many seconds at most."""
        self._silence.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Member:
    """It is waited for only between its first call and :meth:`leave`.

    Attributes:
        outputs: For each request that the pipeline was called for, how many outputs it has; their
            samples lie in that order. Of a lone request they count as one, for it is never cut.
        alone: Whether its calls are never merged.
        key: What the denoiser must be set to for its calls, such as its LoRA adapters; calls of
            different keys are never merged.
        present: For each request that the pipeline was called for, whether it still wants its
            samples. Rows of the others are left out of the forwards, where that can be.
        kind: That of its last call, for identity only; None while nobody need wait for it.
        bell: Wakes its thread.
        layouts: Remembers the layout of its calls.
    """

    def __init__(
        self,
        forget: Callable[["Member"], None],
        *,
        alone: bool,
        key: Hashable,
        outputs: Sequence[int],
    ) -> None:
        """Made by :meth:`Rendezvous.member`."""
        self.alone = alone
        self.key = key
        self.outputs = tuple(outputs) if len(outputs) > 1 else (1,)
        self.present = [True] * len(outputs)
        self.kind: Any = None
        self.bell = Bell()
        self.layouts = LayoutMemory()
        self._forget = forget
        self._forwards = self._shared = 0

    @property
    def batch_mean(self) -> float:
        """Mean number of requests that shared its forwards, its own included."""
        return self._shared / self._forwards if self._forwards else 1.0

    def leave(self) -> None:
        """Be waited for no longer; further calls run alone."""
        self.alone = True
        self._forget(self)

    def count(self, shared: int) -> None:
        """Note how many requests shared a forward of it."""
        self._forwards += 1
        self._shared += shared


# Dimensions of positions that each sample has a row of.
_OF_EACH = 3


def choose_rows(arguments: Arguments, chosen: Sequence[int], rows: int) -> dict[str, Any]:
    """Return the arguments of a call of `rows` rows for the `chosen` ones alone, in that order."""
    return {name: _choose(name, value, chosen, rows) for name, value in arguments.items()}


def place_rows(outputs: Sequence[Any], places: Sequence[Sequence[int]], rows: int) -> Any:
    """Put the rows of `outputs` in their places among `rows`; those of nobody are zero.

    Raises:
        Unmergeable: An output has not the rows of its call.
    """
    first = outputs[0]
    if first is None:
        return None
    if type(first) is tuple:
        return tuple(place_rows(items, places, rows) for items in zip(*outputs, strict=True))
    if isinstance(first, dict):
        make: Any = type(first)
        return make(
            **{name: place_rows([each[name] for each in outputs], places, rows) for name in first}
        )
    if any(len(output) != len(place) for output, place in zip(outputs, places, strict=True)):
        raise Unmergeable("output")
    if torch.is_tensor(first):
        placed = first.new_zeros((rows, *first.shape[1:]))
        for output, place in zip(outputs, places, strict=True):
            placed[torch.tensor(place, device=placed.device)] = output
        return placed
    listed = [torch.zeros_like(first[0])] * rows
    for output, place in zip(outputs, places, strict=True):
        for row, index in zip(output, place, strict=True):
            listed[index] = row
    return type(first)(listed)


def _choose(name: str, value: Any, chosen: Sequence[int], rows: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _choose(key, each, chosen, rows) for key, each in value.items()}
    if torch.is_tensor(value):
        return _choose_of_tensor(name, value, chosen, rows)
    if isinstance(value, (list, tuple)) and name in SHARED | LAYERS:
        return type(value)(_choose(name, each, chosen, rows) for each in value)
    if isinstance(value, (list, tuple)) and len(value) == rows:
        return type(value)(value[index] for index in chosen)
    return value


def _choose_of_tensor(name: str, value: torch.Tensor, chosen: Sequence[int], rows: int) -> Any:
    one_for_all = name in TIMES and value.ndim < 2 and value.numel() == 1
    rows_of_positions = name in POSITION_ROWS and value.ndim == _OF_EACH
    if one_for_all or (name in SHARED and not rows_of_positions):
        return value
    indices = torch.tensor(chosen, device=value.device)
    if name in BY_SECOND:
        return value[:, indices]
    if name in BY_FRAME and len(value) != rows:
        return value.reshape(rows, -1, *value.shape[1:])[indices].flatten(0, 1)
    return value[indices]


Forward = Callable[..., Any]


class Call:
    """One call of a denoiser by one pipeline, and what became of it.

    Attributes:
        member: Whose it is.
        owners: The requests that have rows in it, by their numbers among those of the member.
        outputs: For each of them, how many outputs it has.
        layout: None where it must run alone.
        stats: What was learnt about its kind; calls with the same stats may share a forward.
        arrived: When it came, on the rendezvous' clock.
        shared: How many requests its forward served, its own included.
    """

    def __init__(
        self,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        member: Member,
        arrived: float,
    ) -> None:
        """Take the call as it came."""
        self.forward = forward
        self.args = args
        self.kwargs = kwargs
        self.member = member
        self.owners: Sequence[int] = range(len(member.outputs))
        self.outputs: Sequence[int] = member.outputs
        self.arguments: Mapping[str, Any] = {}
        self.layout: Layout | None = None
        self.stats: BatchStats | None = None
        self.arrived = arrived
        self.shared = self.requests
        self.output: Any = None
        self.error: BaseException | None = None
        self.done = False

    @property
    def kind(self) -> Any:
        """Calls of equal kinds may share a forward; None shares with nobody."""
        if self.layout is None:
            return None
        return self.forward, self.member.key, self.layout.signature

    @property
    def requests(self) -> int:
        """How many requests have rows in it."""
        return len(self.owners)

    @property
    def rows(self) -> int:
        """Samples in the call; 0 where it could not be told."""
        return 0 if self.layout is None else self.layout.rows

    @property
    def row_counts(self) -> list[int]:
        """Samples of each request; of all together where they are not alike."""
        repeats, odd = divmod(self.rows, sum(self.outputs))
        return [self.rows] if odd else [repeats * outputs for outputs in self.outputs]

    def describe(self, names: Sequence[str]) -> None:
        """Find out its layout; `names` are those of the forward's arguments, in their order."""
        if len(self.args) > len(names):  # which the call itself will raise, in its turn
            return
        self.arguments = self.kwargs
        if self.args:
            self.arguments = dict(zip(names, self.args, strict=False)) | self.kwargs
        try:
            self.layout = self.member.layouts.layout(self.arguments, layout)
        except Unmergeable as error:
            warn_once(error.name)

    def parts(self, size: int | None = None) -> "list[tuple[Call, list[int]]]":
        """Return it cut into calls of `size` requests, with the rows that each has of it.

        Without a size, into as large ones as are allowed. Rows of requests that left are in none.
        Empty where it is to run as it is.
        """
        if self.requests == 1 or self.stats is None or self.rows % sum(self.outputs):
            return []
        counts, present = self.row_counts, self.member.present
        here = [index for index, owner in enumerate(self.owners) if present[owner]]
        cut = []
        while here:
            most = size or self.stats.most([counts[index] for index in here])
            cut.append(here[:most])
            here = here[most:]
        if not cut or len(cut[0]) == self.requests:
            return []
        return [self._part(each) for each in cut]

    def _part(self, indices: Sequence[int]) -> "tuple[Call, list[int]]":
        assert self.layout is not None
        ends = list(itertools.accumulate(self.outputs))
        # Guidance and the like repeat all samples, in their order.
        places = sorted(
            place
            for index in indices
            for first in range(ends[index] - self.outputs[index], ends[index])
            for place in range(first, self.rows, ends[-1])
        )
        arguments = choose_rows(self.arguments, places, self.rows)
        part = Call(self.forward, (), arguments, self.member, self.arrived)
        part.arguments, part.stats = arguments, self.stats
        part.layout = replace(self.layout, rows=len(places))
        part.owners = [self.owners[index] for index in indices]
        part.outputs = [self.outputs[index] for index in indices]
        part.shared = part.requests
        return part, places

    def gather(self, parts: "Sequence[tuple[Call, list[int]]]") -> None:
        """Take the outputs of the parts that :meth:`parts` returned, or the first error."""
        errors = [part.error for part, _ in parts if part.error is not None]
        for part, _ in parts:
            part.error = None
        if errors:
            self.error = errors[0]
            return
        outputs = [part.output for part, _ in parts]
        self.output = place_rows(outputs, [places for _, places in parts], self.rows)

    def result(self) -> Any:
        """Return the output, or raise what the forward raised."""
        error, self.error = self.error, None
        if error is None:
            return self.output
        try:
            raise error
        finally:
            # An error that its own traceback holds would keep the tensors of the run.
            del error


@functools.cache
def warn_once(name: str) -> None:
    """Say that calls with this argument run alone, once in a process."""
    _logger.warning(
        "%s: no rule says how to merge it; denoiser calls that have it run alone, which is right"
        " and shares nothing",
        name,
    )
