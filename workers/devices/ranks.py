"""The ranks of a replica: processes that run each denoiser call together with this one."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs
from workers.devices.call_memory import CallMemory
from workers.devices.context_parallel import PartSizes
from workers.devices.copies import DeviceThread, split_calls
from workers.devices.rank_group import meet, rank_groups
from workers.devices.rank_messages import (
    JOIN,
    READY,
    SEND_OUTPUT,
    TO_FLOAT32,
    TO_USUAL_DTYPE,
    Failed,
    Forward,
    ForwardDone,
    MethodCall,
    as_bytes,
    pack,
    unpack,
)
from workers.devices.rank_processes import RankProcesses
from workers.devices.rank_start import LoadingRanks
from workers.devices.weights import weight_dtype
from workers.failures import short_cause
from workers.sharing.denoisers import repeat_changes
from workers.sharing.merging import choose_rows

_logger = logging.getLogger(__name__)


class Rank0Calls:
    """The calls of one replica; one at a time, in the thread of its first device."""

    def __init__(
        self,
        processes: RankProcesses,
        groups: Sequence[range],
        device: torch.device,
        sizes: PartSizes,
        memory: CallMemory,
    ) -> None:
        """Run nothing yet; the first of `groups` begins with rank 0."""
        self.processes = processes
        self._own = groups[0][1:]
        self._others = groups[1:]
        self._device = device
        self._sizes = sizes
        self._memory = memory

    def run(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: int = 0,
        split: Sequence[range] = (),
    ) -> list[Any]:
        """Run a call with the other ranks; returns what each group made of its rows.

        Without `split` the first group runs it whole.

        Raises:
            torch.OutOfMemoryError: It cannot fit into rank 0; no other rank has heard of it.
        """
        self.processes.check()
        packed, tensors = pack((args, kwargs), self._device)
        sent = as_bytes(tensors)
        weight = tuple(len(each) for each in sent)
        self._memory.check(name, weight)
        own = choose_rows(kwargs, split[0], rows) if split else kwargs
        others = self._others[: max(len(split) - 1, 0)]
        try:
            self.processes.tell(Forward(name, packed, rows, tuple(split)))
            for each in sent:
                dist.broadcast(each, src=0)
            with self._memory.learn(name, weight):
                output = forward(*args, **own)
        except BaseException as error:
            self._sizes.forget()
            self.processes.undo(self._own, short_cause(error))
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
            answers = self.processes.answers(group)
            failed = next((each for each in answers.values() if isinstance(each, Failed)), None)
            if failed is not None:
                self.processes.undo(group, failed.cause)
            ended.append(failed or answers[group[0]])
        return ended

    def _take(self, group: range, said: ForwardDone) -> Any:
        """Return the output that the first rank of a group holds for this one."""
        output, tensors = unpack(said.packed, self._device)
        try:
            self.processes.tell(SEND_OUTPUT, group[:1])
            for each in as_bytes(tensors):
                dist.recv(each, src=group[0])
        except Exception as error:
            self.processes.undo(group, short_cause(error))
            raise
        return output


# Seconds in which NCCL's ranks should have left each other.
_LEAVE_S = 10.0


_NOWHERE = torch.device("meta")


class Ranks:
    """The other ranks of this process, started by :meth:`start`.

    Attributes:
        processes: Theirs.
    """

    def __init__(
        self,
        args: EngineArgs,
        denoisers: Mapping[str, Any],
        device_thread: DeviceThread,
        loading: LoadingRanks,
    ) -> None:
        """Bring nothing together yet."""
        self._args = args
        self._denoisers = denoisers
        self._device_thread = device_thread
        self._device: torch.device = next(iter(denoisers.values())).device
        self._world_size = args.parallel_config.world_size
        parallel = args.parallel_config
        self.processes = loading.processes
        self._loading = loading
        self._sizes = PartSizes()
        self._calls = Rank0Calls(
            self.processes,
            rank_groups(parallel),
            self._device,
            self._sizes,
            CallMemory(self._device),
        )
        self._lock = threading.Lock()
        self._joined = False

    @classmethod
    def start(
        cls,
        args: EngineArgs,
        denoisers: Mapping[str, Any],
        device_thread: DeviceThread,
        loading: LoadingRanks | None = None,
    ) -> "Ranks":
        """Have the ranks share each call of the denoisers from here on; starts those not `loading`.

        The process ends its ranks when the thread that starts them ends.

        Raises:
            ModelLoadFailed: One could not start; none is left.
        """
        if loading is None:
            kind = next(iter(denoisers.values())).device.type
            loading = LoadingRanks.start(args, _described(args, denoisers, kind), kind)
        ranks = cls(args, denoisers, device_thread, loading)
        try:
            ranks._open()
        except ModelLoadFailed:
            ranks.close()
            raise
        except Exception as error:
            _logger.exception("the ranks could not be brought together")
            cause = ranks.processes.last_words() or short_cause(error)
            ranks.close()
            raise ModelLoadFailed(f"{args.model}: parallel_config: {cause}") from None
        return ranks

    def watch(self, on_fault: Callable[[str], None]) -> None:
        """Call `on_fault` with the reason, in a thread, once the ranks can work no more."""
        self.processes.watch(on_fault)

    @property
    def supports_float32(self) -> bool:
        """Whether calls in float32 can be shared; the kernels of a ring take lower types alone."""
        return self._args.parallel_config.ring_degree == 1

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Have the other ranks hold their weights in float32 meanwhile; no call may be going on.

        Raises:
            MemoryError: They do not fit into one; all are as before.
        """
        try:
            with self._lock:
                scarce = self._ask(TO_FLOAT32)
            if scarce:
                raise scarce.popitem()[1].as_error()
            yield
        finally:
            with self._lock:
                self._expect_all(TO_USUAL_DTYPE, "the way back to its type")

    def close(self) -> None:
        """End the other ranks; calls of the denoisers fail from here on."""
        self.processes.dismiss()
        if self._joined:
            self._joined = False
            self._leave()
        self.processes.close()

    def _open(self) -> None:
        self._loading.await_loaded()
        self.processes.tell(JOIN)
        self.processes.watch_ends()
        self.processes.await_own(self._device_thread.submit(self.join, self._loading.store))
        self._joined = True
        self.processes.await_all(READY)
        for name, module in self._denoisers.items():
            self._mirror(name, module)

    def join(self, store: Any) -> None:
        """Meet the other ranks by `store`, as rank 0; returns once all are there."""
        meet(0, self._args.parallel_config, store.port, self._denoisers, self._sizes, store)

    def _leave(self) -> None:
        """Leave the other ranks, which have been told to leave too."""
        if self.processes.fault is not None and self._device.type == "cuda":
            return  # NCCL would wait for ranks that are gone
        try:
            self._device_thread.submit(dist.destroy_process_group).result(_LEAVE_S)
        except (TimeoutError, RuntimeError) as error:
            _logger.warning("the ranks were left as they are: %s", short_cause(error))

    def _mirror(self, name: str, module: Any) -> None:
        forward, calls = module.forward, self._calls

        def run(*call: Any) -> list[Any]:
            with self._lock:
                made: list[Any] = self._device_thread.submit(
                    calls.run, name, forward, *call
                ).result()
                return made

        def whole(*args: Any, **kwargs: Any) -> Any:
            return run(args, kwargs)[0]

        def run_parts(arguments: Mapping[str, Any], rows: int, split: Sequence[range]) -> list[Any]:
            return run((), arguments, rows, split)

        def repeat(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with self._lock:
                self._change(name, method, args, kwargs)

        split_calls(module, self._args.parallel_config.cfg_parallel_size, whole, run_parts)
        repeat_changes(module, repeat)

    def _change(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Have all ranks do what has been done to a denoiser here."""
        if "_pipeline" in kwargs:  # for parts that are offloaded, which do not go with ranks
            kwargs = {**kwargs, "_pipeline": None}
        packed, _ = pack((args, kwargs), _NOWHERE)
        self._expect_all(MethodCall(name, method, packed), method)

    def _expect_all(self, message: Any, what: str) -> None:
        """Have all ranks do what rank 0 did; one that cannot is the end of all."""
        for rank, failed in self._ask(message).items():
            self.processes.fail(
                f"rank {rank} could not do {what}, which rank 0 did: {failed.cause}"
            )
        self.processes.check()

    def _ask(self, message: Any) -> dict[int, Failed]:
        """Have all ranks do something outside of calls; returns which could not."""
        self.processes.check()
        self.processes.tell(message)
        said = {rank: self.processes.answers((rank,))[rank] for rank in range(1, self._world_size)}
        return {rank: each for rank, each in said.items() if isinstance(each, Failed)}


def _described(
    args: EngineArgs, denoisers: Mapping[str, Any], kind: str
) -> dict[str, tuple[str, torch.dtype]]:
    """Class and dtype of each; that of quantized ones says little of what they were made from."""
    quantized = args.pipeline.quantization is not None
    return {
        name: (type(each).__name__, weight_dtype(args, kind, name) if quantized else each.dtype)
        for name, each in denoisers.items()
    }
