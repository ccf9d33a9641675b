"""The command line of the benchmark: the flags of vLLM-Omni's client, and some of our own."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

BACKENDS: Final = ("native", "openai", "vllm-omni", "v1/videos")
DATA_SETS: Final = ("random", "trace", "vbench")
TASKS: Final = ("t2i", "i2i", "ti2i", "t2v", "i2v", "ti2v")
IMAGE_TASKS: Final = frozenset({"i2i", "ti2i", "i2v", "ti2v"})
VIDEO_TASKS: Final = frozenset({"t2v", "i2v", "ti2v"})
_PROMPTS: Final = 10
_HOST: Final = "localhost"
_PORT: Final = 8099


@dataclass(frozen=True)
class Options:
    """What to send, how fast, and where the figures go. Times are in seconds.

    Attributes:
        base_url: The service, without a slash at its end.
        model: Name of the model; None for the only one that is served.
        num_prompts: Requests; None for all of a trace, or as many as `requests_made_up`.
        parameters: Fields that every request has unless its row says otherwise.
        request_rate: Mean arrivals in a second (Poisson); infinity for all at once; None for the
            trace's own times, or all at once where there are none.
        max_concurrency: Requests in flight; None for all.
        warmup_requests: Requests that each ready replica serves before the clock starts.
    """

    base_url: str = f"http://{_HOST}:{_PORT}"
    model: str | None = None
    backend: str = "native"
    dataset: str = "random"
    dataset_path: Path | None = None
    task: str = "t2i"
    num_prompts: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    enable_negative_prompt: bool = False
    random_request_config: tuple[Mapping[str, Any], ...] = ()
    num_input_images: int = 1
    request_rate: float | None = None
    arrival_seed: int = 0
    trace_speed: float = 1.0
    max_concurrency: int | None = None
    warmup_requests: int = 1
    warmup_num_inference_steps: int = 2
    slo: bool = False
    slo_ms: float | None = None
    slo_scale: float = 3.0
    timeout: float = 3600.0
    ready_timeout: float = 60.0
    poll_interval: float = 0.5
    api_key: str = field(default="", repr=False)
    output_file: Path | None = None
    report: Path | None = None
    save_dir: Path | None = None
    keep_outputs: bool = False
    disable_tqdm: bool = False

    @property
    def requests_made_up(self) -> int:
        """How many requests to make from a data set without an end."""
        return self.num_prompts or _PROMPTS


_PARAMETERS: Final = ("width", "height", "num_frames", "fps", "num_inference_steps")


def read_options(arguments: Sequence[str] | None, api_key: str) -> Options:
    """Read the command line; a wrong one ends the process with exit code 2, as argparse does.

    Args:
        arguments: Those of the process if None.
        api_key: The key to send where the command line gives none.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))  # what is not on the command line is not in it
    host, port = given.pop("host", _HOST), given.pop("port", _PORT)
    given["base_url"] = given.get("base_url", f"http://{host}:{port}").rstrip("/")
    named = {name: given.pop(name) for name in _PARAMETERS if name in given}
    given["parameters"] = {**named, **given.pop("extra_body", {})}
    if given.get("model") == "default":
        del given["model"]
    options = Options(**{"api_key": api_key, **given})
    if options.report is not None and options.report.suffix not in {".html", ".png"}:
        parser.error(f"--report {options.report}: use a name that ends in .html or .png")
    if options.backend == "v1/videos" and options.task not in VIDEO_TASKS:
        parser.error(f"--backend v1/videos makes videos; use --task t2v instead of {options.task}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.diffusion_benchmark_serving",
        description="Measure throughput and latency of a running service.",
        epilog="docs/benchmarks.md explains the data sets, every figure and how each is measured.",
        argument_default=argparse.SUPPRESS,  # the defaults are those of Options
    )
    _add_service(parser)
    _add_data(parser)
    _add_pace(parser)
    _add_results(parser)
    return parser


def _add_service(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("service").add_argument
    add("--base-url", help="base URL of the service; overrides --host and --port")
    add("--host", help="default: localhost")
    add("--port", type=int, help="default: 8099")
    add("--model", help="model name (default: the only one that is served)")
    add("--backend", choices=BACKENDS, help="calls to use (default: native)")
    add("--api-key", help="key to send (default: API_KEY of the environment)")
    add("--timeout", type=_positive, help="seconds one request may take")
    add("--ready-timeout", type=_number, help="seconds to wait for readiness")
    add("--poll-interval", type=_positive, help="seconds between looks at a video job")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--dataset", choices=DATA_SETS)
    add("--dataset-path", type=Path, help="trace file, or for vbench a file with a prompt a line")
    add("--task", choices=TASKS)
    add("--num-prompts", type=_count, help="default: 10, or all of a trace")
    add("--width", type=_count)
    add("--height", type=_count)
    add("--num-frames", type=_count)
    add("--fps", type=_count)
    add("--num-inference-steps", type=_count, help="default: the model's own")
    add("--seed", type=int, help="request k has this seed + k (default: drawn by the service)")
    add("--enable-negative-prompt", action="store_true")
    add("--random-request-config", type=_profiles, metavar="JSON")
    add("--num-input-images", type=_count, help="images for each request of i2i, i2v")
    add("--extra-body", type=_object, metavar="JSON", help="fields for every request")


def _add_pace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pace").add_argument
    add("--request-rate", type=_positive, help="arrivals a second, Poisson; inf: all at once")
    add("--arrival-seed", type=int, help="of the Poisson arrivals")
    add("--trace-speed", type=_positive, help="2 replays a trace in half its time")
    add(
        "--max-concurrency",
        type=_count,
        help="requests in flight; default: all (vLLM-Omni's client has 1, at which no two "
        "replicas ever work at once)",
    )
    add("--warmup-requests", type=int, help="for each replica and size; 0: none")
    add("--warmup-num-inference-steps", type=_count)


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--slo", action="store_true", help="report how many requests met their latency goal")
    add("--slo-ms", type=_positive, help="goal of requests whose row has none")
    add("--slo-scale", type=_positive, help="goal = scale x latency of one alone")
    add("--output-file", type=Path, help="write the figures there as JSON")
    add("--report", type=Path, help="write a page (.html) or a picture (.png) there")
    add("--save-dir", type=Path, help="keep the outputs in this folder")
    add("--keep-outputs", action="store_true", help="leave the requests in the service afterwards")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return number


def _positive(text: str) -> float:
    number = _number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


def _object(text: str) -> Any:
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"a": 1}}')
    return value


def _profiles(text: str) -> tuple[Any, ...]:
    value = _json(text)
    if not isinstance(value, list) or not value or not all(isinstance(row, dict) for row in value):
        raise argparse.ArgumentTypeError(
            'is not a JSON list of objects, such as [{"width": 512, "height": 512, "weight": 1}]'
        )
    weights = [row.get("weight", 1) for row in value]
    if not all(isinstance(weight, int | float) and weight >= 0 for weight in weights):
        raise argparse.ArgumentTypeError("a weight is not a number from 0 up")
    if not sum(weights):
        raise argparse.ArgumentTypeError("all weights are 0")
    return tuple(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None
