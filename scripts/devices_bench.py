"""What several devices in one replica buy: ``python -m scripts.devices_bench``.

Times single calls of two denoisers with random weights, a UNet and a DiT, on one device, on all
devices by denoiser copies, and by context parallel over ranks. On a CPU the devices are cores, and
a fourth column is one denoiser with as many torch threads. Each repetition runs all ways, so that
what else the machine does falls on all alike; speed-ups over one device are medians of ratios
inside a repetition. The last line on stdout is one JSON document. Knows nothing of replicas and
requests.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel

from configs.stages import EngineArgs, ParallelConfig
from workers.devices.denoiser_copies import spread_rows
from workers.devices.lane import Lane, open_lanes
from workers.devices.ranks import Ranks

WAYS = ("one", "threads", "copies", "ranks")


@dataclass(frozen=True)
class Row:
    """Milliseconds of a call on one device, and speed-ups over it: median, lowest, highest."""

    denoiser: str
    rows: int
    one_ms: float
    speedup: dict[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Size:
    """How large the denoisers are, and what they are called with."""

    channels: tuple[int, ...]
    latent: int
    heads: int
    layers: int
    tokens: int
    words: int


SIZES = {
    "tiny": Size((32, 64), 16, 4, 2, 64, 16),
    "small": Size((64, 128), 32, 8, 6, 256, 64),
    "large": Size((320, 640, 1280), 128, 24, 38, 4096, 512),
}


def unet(size: Size) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """Return a UNet and the arguments of a call of so many rows."""
    levels = len(size.channels)
    made = UNet2DConditionModel(
        block_out_channels=size.channels,
        layers_per_block=2,
        sample_size=size.latent,
        down_block_types=("DownBlock2D", *("CrossAttnDownBlock2D",) * (levels - 1)),
        up_block_types=(*("CrossAttnUpBlock2D",) * (levels - 1), "UpBlock2D"),
        cross_attention_dim=256,
        attention_head_dim=8,
    )

    def call(rows: int) -> dict[str, Any]:
        return {
            "sample": torch.randn(rows, 4, size.latent, size.latent),
            "timestep": torch.tensor(500),
            "encoder_hidden_states": torch.randn(rows, size.words, 256),
            "return_dict": False,
        }

    return made, call


def dit(size: Size) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """Return a FLUX transformer and the arguments of a call of so many rows."""
    made = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=size.layers // 3,
        num_single_layers=size.layers - size.layers // 3,
        attention_head_dim=64,
        num_attention_heads=size.heads,
        joint_attention_dim=512,
        pooled_projection_dim=256,
        axes_dims_rope=(16, 24, 24),
    )

    def call(rows: int) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(rows, size.tokens, 64),
            "encoder_hidden_states": torch.randn(rows, size.words, 512),
            "pooled_projections": torch.randn(rows, 256),
            "timestep": torch.full((rows,), 0.5),
            "img_ids": torch.zeros(size.tokens, 3),
            "txt_ids": torch.zeros(size.words, 3),
            "return_dict": False,
        }

    return made, call


DENOISERS = {"UNet": unet, "DiT": dit}


class Bench:
    """One denoiser, ready in each way."""

    def __init__(
        self, denoiser: Any, device: str, count: int, ways: Sequence[str], closing: ExitStack
    ) -> None:
        """Put the denoiser on the devices for those ways; `closing` ends what was started."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self._dtype = dtype
        self._count = count
        whole = denoiser.to(self._device).eval()
        if device == "cuda":
            whole = whole.to(dtype)
        self._modules = {"one": whole}
        if device == "cpu" and "threads" in ways:
            self._modules["threads"] = whole
        lanes = self._lanes = open_lanes(device, count)
        for lane in lanes:
            closing.callback(lane.close)
        if "copies" in ways:
            self._modules["copies"] = copy.deepcopy(whole)
            spread_rows(self._modules["copies"], lanes)
        if "ranks" in ways and getattr(whole, "_cp_plan", None) is not None:
            self._modules["ranks"] = self._on_ranks(copy.deepcopy(whole), lanes[0], closing)

    def _on_ranks(self, module: Any, lane: Lane, closing: ExitStack) -> Any:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        module.save_pretrained(Path(folder) / "transformer")
        parallel = ParallelConfig(world_size=self._count, ulysses_degree=self._count)
        args = EngineArgs(folder, parallel_config=parallel)
        closing.callback(Ranks.start(args, {"transformer": module}, lane).close)
        return module

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which it can run."""
        return tuple(way for way in WAYS if way in self._modules)

    def arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments on the device, in the type of the weights."""
        return {
            name: value.to(self._device, self._dtype if value.is_floating_point() else None)
            if torch.is_tensor(value)
            else value
            for name, value in call.items()
        }

    def run(self, way: str, arguments: dict[str, Any]) -> float:
        """Return the seconds of one call."""
        module = self._modules[way]

        def timed() -> float:
            started = time.perf_counter()
            module(**arguments)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return time.perf_counter() - started

        with torch.inference_mode():
            if way == "one":
                seconds: float = self._lanes[0].submit(timed).result()
                return seconds
            return timed()


def measure(bench: Bench, name: str, call: dict[str, Any], rows: int, repeats: int) -> Row:
    """Run all ways `repeats` times, after three times that do not count."""
    arguments = bench.arguments(call)
    times: dict[str, list[float]] = {way: [] for way in bench.ways}
    for repeat in range(-3, repeats):
        turn = repeat % len(bench.ways)
        for way in bench.ways[turn:] + bench.ways[:turn]:
            seconds = bench.run(way, arguments)
            if repeat >= 0:
                times[way].append(seconds)
    ratios = {
        way: sorted(one / own for one, own in zip(times["one"], times[way], strict=True))
        for way in bench.ways[1:]
    }
    return Row(
        denoiser=name,
        rows=rows,
        one_ms=round(1000 * median(times["one"]), 1),
        speedup={
            way: (round(median(found), 2), round(found[0], 2), round(found[-1], 2))
            for way, found in ratios.items()
        },
    )


def table(row: Row) -> str:
    """Return a line for the row, as Markdown."""
    cells = [
        "{:.2f} [{:.2f}-{:.2f}]".format(*row.speedup[way]) if way in row.speedup else "none"
        for way in WAYS[1:]
    ]
    return f"| {row.denoiser} | {row.rows} | {row.one_ms:.1f} ms | {' | '.join(cells)} |"


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--devices", type=int, default=2, help="cores or GPUs of the replica")
    parser.add_argument("--size", choices=tuple(SIZES), default=None, help="large on CUDA")
    parser.add_argument("--denoisers", choices=tuple(DENOISERS), nargs="+", default=list(DENOISERS))
    parser.add_argument("--ways", choices=WAYS[1:], nargs="+", default=list(WAYS[1:]))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4], help="rows of a call")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    chosen = options()
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZES[chosen.size or ("large" if device == "cuda" else "small")]
    torch.set_num_threads(chosen.devices if "threads" in chosen.ways else 1)
    torch.manual_seed(0)
    before = os.getloadavg()[0]
    print("| denoiser | rows | one device | threads | copies | ranks |")
    print("|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for name in chosen.denoisers:
        denoiser, call = DENOISERS[name](size)
        with ExitStack() as closing:
            bench = Bench(denoiser, device, chosen.devices, chosen.ways, closing)
            for number in chosen.rows:
                row = measure(bench, name, call(number), number, chosen.repeats)
                rows.append(asdict(row))
                print(table(row), flush=True)
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    print(json.dumps({"devices": chosen.devices, "kind": device, "load": load, "rows": rows}))


if __name__ == "__main__":
    main()
