"""Ranks from their start to the end of their loading, which rank 0 does at the same time."""

from collections.abc import Mapping
from typing import Any, Self

import torch

from configs.stage_config import EngineArgs
from workers.devices.copies import chunk_cores
from workers.devices.rank_group import open_store
from workers.devices.rank_messages import LOADED, Start
from workers.devices.rank_processes import RankProcesses


class LoadingRanks:
    """The processes of the other ranks, which load their denoisers.

    Attributes:
        processes: They.
        store: Where they meet once they have loaded.
    """

    def __init__(self, processes: RankProcesses, store: Any) -> None:
        """Made by :meth:`start`."""
        self.processes = processes
        self.store = store
        self._loaded = False

    @classmethod
    def start(
        cls, args: EngineArgs, described: Mapping[str, tuple[str, torch.dtype]], kind: str
    ) -> Self:
        """Start them on devices of a kind, `cpu` or `cuda`.

        `described` has the class of diffusers of each denoiser and its dtype. The process ends its
        ranks when the thread that calls this ends.
        """
        parallel = args.parallel_config
        size = parallel.world_size
        store, cores = open_store(size), chunk_cores(size)
        ranks = cls(RankProcesses(args.model, size, parallel.collective_timeout_s), store)
        try:
            for rank in range(1, size):
                ranks.processes.start(
                    Start(
                        rank=rank,
                        world_size=size,
                        port=store.port,
                        core=cores[rank],
                        args=args,
                        kind=kind,
                        denoisers=described,
                    )
                )
        except BaseException:
            ranks.close()
            raise
        return ranks

    def await_loaded(self) -> None:
        """Wait until all have loaded, however long that takes; the second time there is no wait.

        Raises:
            ModelLoadFailed: One could not.
        """
        if not self._loaded:
            self.processes.await_all(LOADED, patient=True)
            self._loaded = True

    def close(self) -> None:
        """End them, whatever they do; nothing happens a second time."""
        self.processes.dismiss()
        self.processes.close()
