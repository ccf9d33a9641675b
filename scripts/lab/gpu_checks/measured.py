"""The measured checks, a group in a process: ``python -m scripts.lab.gpu_checks.measured GROUP``.

A pipeline like FLUX with random weights makes the same request plain and with each setting: blocks
of the published size at 1024 pixels on CUDA, and a few small ones on a CPU. (The attention of
Stable Diffusion 3 takes no backend in diffusers 0.42, and its blocks are not compiled.)
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from configs.errors import ModelLoadFailed
from configs.parameters import Parameters
from configs.stage_config import (
    EngineArgs,
    PipelineSettings,
    Quantization,
    ReplicaPlan,
    RuntimeConfig,
    StageConfig,
)
from scripts.lab.bench_models import MODELS, make
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loading.settings import (
    compile_blocks,
    finish_settings,
    offload_layers,
    offload_parts,
)
from workers.engine.progress import SilentProgress

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
MODEL = MODELS["flux_part" if CUDA else "flux"]
BACKENDS = (
    "native",
    "_native_math",
    "_native_flash",
    "_native_efficient",
    "_native_cudnn",
    "flash",
    "sage",
)
METHODS = ("int8", "fp8", "bitsandbytes_8bit", "bitsandbytes_4bit")


class Skipped(Exception):
    """A check cannot be made here, and why."""


@dataclass(frozen=True)
class Made:
    """A request, timed: seconds, peak of GPU memory in GiB, and its picture, `[h, w, 3]`."""

    seconds: float
    peak_gib: float
    pixels: Any

    def beside(self, plain: "Made") -> str:
        """Return the figures beside those of the plain pipeline."""
        apart = float(np.abs(self.pixels.astype(int) - plain.pixels).mean())
        return (
            f"{self.seconds:.2f} s (plain {plain.seconds:.2f}), peak {self.peak_gib:.1f} GiB"
            f" (plain {plain.peak_gib:.1f}), pixels {apart:.2f} of 255 apart on average"
        )


def check(name: str, do: Callable[[], str]) -> None:
    """Make a check and write its row."""
    row = {"check": name, "status": "ok", "figure": "", "reason": ""}
    try:
        row["figure"] = do()
    except (Skipped, ImportError) as error:
        row |= {"status": "skipped", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - it is the row, and the next check goes on
        text = str(error).strip().splitlines() or [""]
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {text[0][:200]}"}
    print(json.dumps(row), flush=True)
    if CUDA:
        torch.cuda.empty_cache()


def engine_of(pipe: Any, settings: PipelineSettings | None = None, at_once: int = 1) -> Engine:
    """Serve a pipeline that has its settings."""
    abilities = inspect_abilities(pipe, {})
    sized = replace(abilities, default_width=MODEL.size, default_height=MODEL.size)
    return Engine(pipe, sized, settings, max_num_seqs=at_once)


def asked(seed: int = 0) -> Parameters:
    """Return a request."""
    return Parameters(
        prompt="a red circle on a blue background",
        seed=seed,
        width=MODEL.size,
        height=MODEL.size,
        num_inference_steps=MODEL.steps,
        guidance_scale=MODEL.guidance,
    )


def made_by(engine: Engine) -> Made:
    """Make a request twice and measure the second, for the first builds and fetches things."""
    engine.generate(asked(), SilentProgress())
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    image = engine.generate(asked(), SilentProgress()).images[0]
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    return Made(seconds, peak, np.asarray(image))


def device() -> None:
    """Say what is here."""

    def about() -> str:
        if not CUDA:
            return f"cpu, torch {torch.__version__}"
        name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
        return f"cuda: {count} x {name}, torch {torch.__version__}, CUDA {torch.version.cuda}"

    check("device", about)


def attention() -> None:
    """Make the same picture with each attention backend."""
    pipe = make(MODEL, DEVICE.type)
    plain = made_by(engine_of(pipe))

    def with_backend(name: str) -> str:
        if not CUDA and name not in {"native", "_native_math"}:
            raise Skipped("needs a CUDA device")
        settings = PipelineSettings(attention_backend=name)
        try:
            finish_settings(pipe, settings)
        except ModelLoadFailed as error:
            raise Skipped(str(error)) from None
        return made_by(engine_of(pipe, settings)).beside(plain)

    for name in BACKENDS:
        check(f"attention_backend {name}", lambda name=name: with_backend(name))  # type: ignore[misc]


def compiled() -> None:
    """Compile the repeated blocks; on a CPU by torch's backend that builds nothing."""
    pipe = make(MODEL, DEVICE.type)
    plain = made_by(engine_of(pipe))

    def regional() -> str:
        compile_blocks(pipe, dynamic=True, backend="inductor" if CUDA else "eager")
        engine = engine_of(pipe)
        began = time.perf_counter()
        engine.generate(asked(), SilentProgress())
        first = time.perf_counter() - began
        return f"first {first:.1f} s, then {made_by(engine).beside(plain)}"

    check("compile regional", regional)


def offload() -> None:
    """Keep parts or blocks on the host."""
    plain = made_by(engine_of(make(MODEL, DEVICE.type)))

    def offloaded(key: str, do: Callable[[Any, torch.device], None]) -> str:
        pipe = make(MODEL, DEVICE.type)
        do(pipe, DEVICE)
        return made_by(engine_of(pipe, PipelineSettings(**{key: True}))).beside(plain)  # type: ignore[arg-type]

    check("enable_cpu_offload", lambda: offloaded("enable_cpu_offload", offload_parts))
    check("enable_layerwise_offload", lambda: offloaded("enable_layerwise_offload", offload_layers))


def quantization() -> None:
    """Load the weights smaller than they are, from a folder, as a replica does."""
    with TemporaryDirectory() as folder:
        pipe = make(MODEL, DEVICE.type)
        plain = made_by(engine_of(pipe))
        pipe.save_pretrained(folder)
        del pipe

        def loaded(method: str) -> str:
            if not CUDA and method != "int8":
                raise Skipped("needs a CUDA device")
            settings = PipelineSettings(quantization=Quantization(method))
            args = EngineArgs(folder, device="cuda" if CUDA else "cpu", pipeline=settings)
            plan = ReplicaPlan("replica0", 0, StageConfig(0, RuntimeConfig((0,)), args), (0,))
            try:
                engine = Engine.load(plan)
            except ModelLoadFailed as error:
                if "package" in str(error) or "install" in str(error):
                    raise Skipped(str(error)) from None
                raise
            return made_by(engine).beside(plain)

        for method in METHODS:
            check(f"quantization {method}", lambda method=method: loaded(method))  # type: ignore[misc]


def requests() -> None:
    """Make requests one after another from two threads, and several at once."""
    pipe = make(MODEL, DEVICE.type)

    def gaps() -> str:
        engine = engine_of(pipe)
        made_by(engine)
        own: list[float] = []
        one = threading.Lock()

        def generate(seed: int) -> None:
            with one:
                began = time.perf_counter()
                made = engine.generate(asked(seed), SilentProgress())
                took = time.perf_counter() - began
            own.append(took - made.encode_s - made.denoise_s - made.decode_s)

        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(generate, range(6)))
        whole = (time.perf_counter() - began) / 6
        return f"{1000 * sum(own) / 6:.1f} ms of {1000 * whole:.0f} ms a request in no phase"

    def memory() -> str:
        engine = engine_of(pipe, at_once=4)
        engine.warm_up()
        found = []
        for count in (1, 2, 4):
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            with ThreadPoolExecutor(count) as pool:
                list(
                    pool.map(
                        lambda seed: engine.generate(asked(seed), SilentProgress()), range(count)
                    )
                )
            peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
            found.append(f"{count}: {peak:.1f} GiB")
        return "peak by requests at once " + ", ".join(found)

    check("idle between requests", gaps)
    check("memory of requests at once", memory)


GROUPS: dict[str, Callable[[], None]] = {
    "device": device,
    "attention": attention,
    "compile": compiled,
    "offload": offload,
    "quantization": quantization,
    "requests": requests,
}


if __name__ == "__main__":
    if not CUDA:
        torch.set_num_threads(1)
    GROUPS[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # what compiles has processes of its own, for which torch would wait
