"""The devices of one replica, and how its denoiser uses them.

Several devices share the work in one of two ways: copies of the denoiser take rows of each call
(``workers.devices.copies``), or ranks take parts of its sequence
(``workers.devices.ranks``), several groups of them rows too. Which one is said by the stage, or
follows from the model.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch

from configs.errors import ModelLoadFailed
from configs.stage_config import ParallelConfig, ReplicaPlan
from workers.devices.context_parallel import refusal
from workers.devices.copies import DeviceThread, open_device_threads, spread_rows
from workers.devices.rank_start import LoadingRanks
from workers.devices.ranks import Ranks
from workers.devices.weights import DENOISERS, weight_dtype
from workers.failures import short_cause
from workers.families import manners_of

_logger = logging.getLogger(__name__)


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the denoisers of a pipeline by the names of its parts."""
    parts = {name: pipe.components.get(name) for name in DENOISERS}
    return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}


class DeviceChunk:
    """What has been opened on the devices of a replica.

    Attributes:
        ranks: The other ranks; None where calls are not shared with processes.
    """

    def __init__(
        self, device_threads: Sequence[DeviceThread] = (), ranks: Ranks | None = None
    ) -> None:
        """Made by :meth:`open`; one of a single device has nothing to open."""
        self._device_threads = device_threads
        self.ranks = ranks

    @classmethod
    def open(cls, pipe: Any, plan: ReplicaPlan, loading: LoadingRanks | None = None) -> Self:
        """Have all devices of `plan` work for the denoisers of `pipe`, which is on the first.

        `loading` are its other ranks, where :func:`begin_ranks` has started them.

        Raises:
            ModelLoadFailed: The model cannot use them in the way that the stage asks for.
        """
        args, count = plan.stage.engine_args, len(plan.devices)
        found = denoisers(pipe)
        if count == 1 or args.parallel_config.way == "device_map" or not found:
            return cls()
        parallel = choose(args.parallel_config, found)
        device_threads = open_device_threads(pipe.device.type, count)
        try:
            if parallel.way == "context":
                for device_thread in device_threads[1:]:  # each a process of its own
                    device_thread.close()
                ranks = Ranks.start(
                    replace(args, parallel_config=parallel), found, device_threads[0], loading
                )
                return cls(device_threads[:1], ranks)
            for module in found.values():
                spread_rows(module, device_threads)
        except Exception as error:
            for device_thread in device_threads:
                device_thread.close()
            if isinstance(error, ModelLoadFailed):
                raise
            cause = str(error) if isinstance(error, ValueError) else short_cause(error)
            failed = f"{args.model}: parallel_config: {cause}; use one device for each replica"
        else:
            _logger.info("%d denoiser copies share the rows of each call", count)
            return cls(device_threads)
        # Raised out here, so that no traceback keeps copies in memory.
        raise ModelLoadFailed(failed)

    @property
    def supports_float32(self) -> bool:
        """Whether denoiser calls in float32 can run on the devices."""
        return self.ranks is None or self.ranks.supports_float32

    def in_float32(self) -> AbstractContextManager[None]:
        """Hold the weights of other processes in float32 meanwhile: :meth:`Ranks.in_float32`."""
        return nullcontext() if self.ranks is None else self.ranks.in_float32()

    def watch(self, on_fault: Callable[[str], None]) -> None:
        """Call `on_fault` with the reason once the devices can work no more."""
        if self.ranks is not None:
            self.ranks.watch(on_fault)

    def close(self) -> None:
        """End what was opened; calls of the denoisers fail from here on."""
        if self.ranks is not None:
            self.ranks.close()
        for device_thread in self._device_threads:
            device_thread.close()


def begin_ranks(
    plan: ReplicaPlan, kinds: Mapping[str, str], device: str, make: Callable[[str], Any]
) -> LoadingRanks | None:
    """Start the other ranks, to load while rank 0 does; None where there will be none.

    `kinds` has the class of each denoiser; `device` is `cpu` or `cuda`. Where the stage leaves the
    way to the model, `make` returns a denoiser without weights by its name.

    Raises:
        ModelLoadFailed: The denoisers cannot work in the way that the stage asks for.
    """
    args = plan.stage.engine_args
    parallel = args.parallel_config
    if len(plan.devices) == 1 or not kinds:
        return None
    if parallel.way == "auto":
        parallel = choose(parallel, {name: make(name) for name in kinds})
    if parallel.way != "context":
        return None
    described = {name: (kind, weight_dtype(args, device, name)) for name, kind in kinds.items()}
    return LoadingRanks.start(replace(args, parallel_config=parallel), described, device)


def choose(parallel: ParallelConfig, found: Mapping[str, Any]) -> ParallelConfig:
    """Return the way that the stage asks for, or the one that suits the denoisers.

    Raises:
        ModelLoadFailed: They cannot work in the way that the stage asks for.
    """
    refusals = [refusal(module, parallel) for module in found.values()]
    if parallel.way == "context" and any(refusals):
        raise ModelLoadFailed(f"parallel_config: {next(filter(None, refusals))}")
    if parallel.way != "auto":
        return parallel
    size = parallel.world_size
    shared = replace(parallel, ulysses_degree=size)
    one_row = all(manners_of(module).one_row_calls for module in found.values())
    if one_row and not any(refusal(module, shared) for module in found.values()):
        return shared
    return replace(parallel, cfg_parallel_size=size)
