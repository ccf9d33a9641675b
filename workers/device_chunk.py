"""The devices of one replica, and how its denoiser uses them.

Several devices share the work in one of two ways: copies of the denoiser take rows of each call
(``workers.denoiser_copies``), or ranks take parts of its sequence (``workers.ranks``). Which one is
said by the stage, or follows from the model. Does not know requests.
"""

import logging
from collections.abc import Sequence
from typing import Any, Self

import torch

from configs.errors import ModelLoadFailed
from configs.stages import ReplicaPlan
from workers.denoiser_copies import spread_rows
from workers.lane import Lane, open_lanes

_logger = logging.getLogger(__name__)

DENOISERS = ("unet", "transformer", "transformer_2")


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the denoisers of a pipeline by the names of its parts."""
    parts = {name: pipe.components.get(name) for name in DENOISERS}
    return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}


class DeviceChunk:
    """What has been opened on the devices of a replica."""

    def __init__(self, lanes: Sequence[Lane] = ()) -> None:
        """Made by :meth:`open`; one of a single device has nothing to open."""
        self._lanes = lanes

    @classmethod
    def open(cls, pipe: Any, plan: ReplicaPlan) -> Self:
        """Have all devices of `plan` work for the denoisers of `pipe`, which is on the first.

        Raises:
            ModelLoadFailed: The model can not use them in the way that the stage asks for.
        """
        args, count = plan.stage.engine_args, len(plan.devices)
        way = args.parallel_config.way
        found = denoisers(pipe)
        if count == 1 or way == "device_map" or not found:
            return cls()
        if way == "context":
            raise ModelLoadFailed(
                f"{args.model}: parallel_config: ulysses_degree and ring_degree are not served yet;"
                " use cfg_parallel_size"
            )
        lanes = open_lanes(pipe.device.type, count)
        try:
            for module in found.values():
                spread_rows(module, lanes)
        except ValueError as error:
            raise ModelLoadFailed(
                f"{args.model}: parallel_config: {error}; use one device for each replica"
            ) from None
        _logger.info("%d denoiser copies share the rows of each call", count)
        return cls(lanes)

    def close(self) -> None:
        """End what was opened; calls of the denoisers fail from here on."""
        for lane in self._lanes:
            lane.close()
