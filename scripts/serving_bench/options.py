"""What the benchmark is to do. Reads no command line (`command_line.py`) and no environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

BACKENDS: Final = ("native", "openai", "vllm-omni", "v1/videos")
DATA_SETS: Final = ("random", "trace", "vbench")
TASKS: Final = ("t2i", "i2i", "ti2i", "t2v", "i2v", "ti2v")
IMAGE_TASKS: Final = frozenset({"i2i", "ti2i", "i2v", "ti2v"})
VIDEO_TASKS: Final = frozenset({"t2v", "i2v", "ti2v"})
_PROMPTS: Final = 10


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
        max_concurrency: Requests on the way at a time; None for all.
        warmup_requests: Requests that each ready replica serves before the clock starts.
    """

    base_url: str = "http://localhost:8099"
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
        """How many requests a data set that has no end gives."""
        return self.num_prompts or _PROMPTS
