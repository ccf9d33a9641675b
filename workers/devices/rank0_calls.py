"""The denoiser calls as rank 0 runs them, together with the other ranks of its replica.

All ranks are told of each call. Those of the group of rank 0 are in the same collectives as it is,
and need to say nothing; those of other groups say how they ended their parts, so that rank 0 goes
on only once none of them can be left in a collective. Does not know denoisers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from workers.denoiser.failure_cause import short_cause
from workers.denoiser.row_choice import choose_rows
from workers.devices.call_packing import as_bytes, pack, unpack
from workers.devices.rank_messages import TAKE, Failed, Forward, Output
from workers.devices.rank_processes import RankProcesses


class Rank0Calls:
    """The calls of one replica; one at a time, in the thread of its first device."""

    def __init__(
        self, processes: RankProcesses, groups: Sequence[range], device: torch.device
    ) -> None:
        """Run nothing yet; the first of `groups` begins with rank 0."""
        self._processes = processes
        self._own = groups[0][1:]
        self._others = groups[1:]
        self._device = device

    def run(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: int = 0,
        dealt: Sequence[range] = (),
    ) -> list[Any]:
        """Run a call with the other ranks; returns what each group made of its rows.

        Without `dealt` the first group runs it whole.
        """
        self._processes.check()
        packed, tensors = pack((args, kwargs), self._device)
        sent = as_bytes(tensors)
        own = choose_rows(kwargs, dealt[0], rows) if dealt else kwargs
        others = self._others[: max(len(dealt) - 1, 0)]
        try:
            self._processes.tell(Forward(name, packed, rows, tuple(dealt)))
            for each in sent:
                dist.broadcast(each, src=0)
            output = forward(*args, **own)
        except BaseException as error:
            self._processes.undo(self._own, short_cause(error))
            self._ended(others)
            raise
        ended = self._ended(others)
        for said in ended:
            if isinstance(said, Failed):
                raise said.as_error()
        return [output, *map(self._take, others, ended)]

    def _ended(self, groups: Sequence[range]) -> list[Any]:
        """Wait until these have ended their parts of a call; returns what each says of it."""
        ended = []
        for group in groups:
            answers = self._processes.answers(group)
            failed = next((each for each in answers.values() if isinstance(each, Failed)), None)
            if failed is not None:
                self._processes.undo(group, failed.cause)
            ended.append(failed or answers[group[0]])
        return ended

    def _take(self, group: range, said: Output) -> Any:
        """Return the output that the first rank of a group holds for this one."""
        output, tensors = unpack(said.packed, self._device)
        try:
            self._processes.tell(TAKE, group[:1])
            for each in as_bytes(tensors):
                dist.recv(each, src=group[0])
        except Exception as error:
            self._processes.undo(group, short_cause(error))
            raise
        return output
