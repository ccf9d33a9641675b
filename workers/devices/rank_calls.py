"""A rank's part of the denoiser calls: which rows, what is said of it, and what is given back.

Ranks of the group of rank 0 say nothing of a part that they ended: rank 0 ended it with them. Those
of other groups say so, and the first of them holds the output until rank 0 takes it. Does not know
processes, and how a denoiser was loaded.
"""

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from workers.denoiser.failure_cause import is_out_of_memory, short_cause
from workers.denoiser.row_choice import choose_rows
from workers.devices.call_packing import as_bytes, pack, unpack
from workers.devices.rank_group import rank_groups
from workers.devices.rank_messages import (
    UNDONE,
    VERDICT_S,
    Failed,
    Forward,
    Output,
    Start,
    receive,
    send,
)


class RankCalls:
    """The calls of one rank, as rank 0 tells it of them."""

    def __init__(
        self, start: Start, device: torch.device, denoisers: Mapping[str, Any], pipe: Connection
    ) -> None:
        """Run nothing yet."""
        groups = rank_groups(start.args.parallel_config)
        self._group = next(index for index, each in enumerate(groups) if start.rank in each)
        self._gives_back = self._group > 0 and start.rank == groups[self._group][0]
        self._device = device
        self._denoisers = denoisers
        self._pipe = pipe
        # Of the last call, until rank 0 takes it.
        self._output: list[torch.Tensor] = []

    def run(self, message: Forward) -> None:
        """Run this rank's part of a call, if it has one."""
        self._output = []
        if self._group >= max(len(message.dealt), 1):
            self._arguments(message)
            return
        try:
            args, kwargs = self._arguments(message)
            if message.dealt:
                kwargs = choose_rows(kwargs, message.dealt[self._group], message.rows)
            said: Output | Failed = self._keep(self._denoisers[message.denoiser](*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - rank 0 raises it too, or this process ends
            said = Failed(short_cause(error), is_out_of_memory(error))
        if self._group > 0:
            send(self._pipe, said)
        elif isinstance(said, Failed):
            self._await_verdict(said.cause)

    def give_back(self) -> None:
        """Send the output to rank 0, which waits for it."""
        for each in self._output:
            dist.send(each, dst=0)
        self._output = []

    def settle(self) -> None:
        """Say that no call is going on here."""
        self._output = []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # too little memory is why most calls fail
        send(self._pipe, UNDONE)

    def _arguments(self, message: Forward) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, which all ranks get together, those without a part too."""
        (args, kwargs), tensors = unpack(message.packed, self._device)
        for each in as_bytes(tensors):
            dist.broadcast(each, src=0)
        return args, kwargs

    def _keep(self, output: Any) -> Output:
        if not self._gives_back:
            return Output()
        packed, tensors = pack(output, self._device)
        self._output = as_bytes(tensors)
        return Output(packed)

    def _await_verdict(self, cause: str) -> None:
        """After a call that failed here: end it as rank 0 does, or end this process.

        Were rank 0 to go on, it would wait in a collective that this rank has left.
        """
        if not self._pipe.poll(VERDICT_S) or receive(self._pipe) != UNDONE:
            raise RuntimeError(f"failed in a call in which rank 0 did not: {cause}")
        self.settle()
