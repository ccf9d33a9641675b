"""The ranks of a replica: processes that run each denoiser call together with this one.

This process is rank 0, the others are its children (``workers.rank_processes``). As many as
`ulysses_degree` x `ring_degree` says are a group and share the sequence of a call;
`cfg_parallel_size` groups share its rows. Rank 0 tells all of each call and runs its own part, in
its pipelines' loops as ever: steps, interrupts and the rendezvous know nothing of ranks. A rank
that ends, or fails where the others of its group do not, ends the replica, for the group can not be
mended. Does not know pipelines and requests.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from configs.errors import ModelLoadFailed
from configs.stages import EngineArgs
from workers.call_packing import as_bytes, pack, unpack
from workers.context_parallel import share_sequence
from workers.denoiser_changes import repeat_changes
from workers.failure_cause import short_cause
from workers.lane import Lane, chunk_cores
from workers.rank_group import join_group, open_mesh, open_store, rank_groups
from workers.rank_messages import JOIN, LOADED, READY, TAKE, Change, Failed, Forward, Output, Start
from workers.rank_processes import RankProcesses
from workers.row_choice import choose_rows
from workers.row_dealing import deal_calls

_logger = logging.getLogger(__name__)

_NOWHERE = torch.device("meta")


class Ranks:
    """The other ranks of this process, started by :meth:`start`."""

    def __init__(self, args: EngineArgs, denoisers: Mapping[str, Any], lane: Lane) -> None:
        """Start nothing yet."""
        self._args = args
        self._denoisers = denoisers
        self._lane = lane
        self._device: torch.device = next(iter(denoisers.values())).device
        self._world_size = args.parallel_config.world_size
        own, *self._others = rank_groups(args.parallel_config)
        self._own = own[1:]
        self._processes = RankProcesses(args.model, self._world_size)
        self._lock = threading.Lock()

    @classmethod
    def start(cls, args: EngineArgs, denoisers: Mapping[str, Any], lane: Lane) -> "Ranks":
        """Start the ranks and have them share each call of the denoisers from here on.

        The process ends its ranks when the thread that calls this ends.

        Raises:
            ModelLoadFailed: One could not start; none is left.
        """
        ranks = cls(args, denoisers, lane)
        try:
            ranks._open()
        except ModelLoadFailed:
            ranks.close()
            raise
        except Exception as error:
            ranks.close()
            _logger.exception("the ranks could not be brought together")
            cause = ranks._processes.fault or short_cause(error)
            raise ModelLoadFailed(f"{args.model}: parallel_config: {cause}") from None
        return ranks

    def watch(self, on_fault: Callable[[str], None]) -> None:
        """Call `on_fault` with the reason, in a thread, once the ranks can work no more."""
        self._processes.watch(on_fault)

    def close(self) -> None:
        """End the other ranks; calls of the denoisers fail from here on."""
        self._processes.close()
        # NCCL would wait for ranks that are gone.
        if dist.is_initialized() and (self._processes.fault is None or self._device.type == "cpu"):
            dist.destroy_process_group()

    def _open(self) -> None:
        store = open_store(self._world_size)
        cores = chunk_cores(self._world_size)
        described = {
            name: (type(module).__name__, module.dtype) for name, module in self._denoisers.items()
        }
        for rank in range(1, self._world_size):
            self._processes.start(
                Start(
                    rank=rank,
                    world_size=self._world_size,
                    port=store.port,
                    core=cores[rank],
                    args=self._args,
                    kind=self._device.type,
                    denoisers=described,
                )
            )
        self._processes.await_all(LOADED)
        self._processes.tell(JOIN)
        self._processes.watch_ends()
        self._lane.submit(self._join, store).result()
        self._processes.await_all(READY)
        for name, module in self._denoisers.items():
            self._mirror(name, module)

    def _join(self, store: Any) -> None:
        parallel = self._args.parallel_config
        join_group(0, self._world_size, store.port, self._device, store)
        mesh = open_mesh(self._device, parallel)
        for module in self._denoisers.values():
            share_sequence(module, parallel, mesh)

    def _mirror(self, name: str, module: Any) -> None:
        forward = module.forward

        def run(*call: Any) -> list[Any]:
            with self._lock:
                made: list[Any] = self._lane.submit(self._call, name, forward, *call).result()
                return made

        def whole(*args: Any, **kwargs: Any) -> Any:
            return run(args, kwargs)[0]

        def run_parts(arguments: Mapping[str, Any], rows: int, dealt: Sequence[range]) -> list[Any]:
            return run((), arguments, rows, dealt)

        def repeat(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with self._lock:
                self._change(name, method, args, kwargs)

        deal_calls(module, 1 + len(self._others), whole, run_parts)
        repeat_changes(module, repeat)

    def _call(
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
        except BaseException:
            self._processes.undo(self._own)
            self._ended(others)
            raise
        ended = self._ended(others)
        for said in ended:
            if isinstance(said, Failed):
                kind = torch.OutOfMemoryError if said.out_of_memory else RuntimeError
                raise kind(said.cause)
        return [output, *map(self._take, others, ended)]

    def _ended(self, groups: Sequence[range]) -> list[Any]:
        """Wait until these have ended their parts of a call; returns what each says of it."""
        ended = []
        for group in groups:
            answers = self._processes.answers(group)
            failed = next((each for each in answers.values() if isinstance(each, Failed)), None)
            if failed is not None:
                self._processes.undo(group)
            ended.append(failed or answers[group[0]])
        return ended

    def _take(self, group: range, said: Output) -> Any:
        """Return the output that the first rank of a group holds for this one."""
        output, tensors = unpack(said.packed, self._device)
        try:
            self._processes.tell(TAKE, group[:1])
            for each in as_bytes(tensors):
                dist.recv(each, src=group[0])
        except Exception:
            self._processes.undo(group)
            raise
        return output

    def _change(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Have all ranks do what has been done to a denoiser here."""
        self._processes.check()
        if "_pipeline" in kwargs:  # for parts that are offloaded, which do not go with ranks
            kwargs = {**kwargs, "_pipeline": None}
        packed, _ = pack((args, kwargs), _NOWHERE)
        self._processes.tell(Change(name, method, packed))
        for rank in range(1, self._world_size):
            said = self._processes.answers((rank,))[rank]
            if isinstance(said, Failed):
                self._processes.fail(
                    f"rank {rank} could not do {method}, which rank 0 did: {said.cause}"
                )
        self._processes.check()
