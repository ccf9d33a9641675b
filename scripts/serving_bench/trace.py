"""Reads a trace: requests of unequal size, each with the time at which it arrived.

The format stands in docs/benchmarks.md: a line for each request, either vLLM-Omni's
`Request(prompt="...", width=512, timestamp=0.4)` or a JSON object with the same keys. Does not know
when anything is sent (`arrivals.py`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from scripts.serving_bench.planned_request import BenchRefused, PlannedRequest

_WHOLE: Final[tuple[str, ...]] = ("width", "height", "num_frames", "num_inference_steps", "seed")
_NUMBERS: Final[tuple[str, ...]] = (
    "fps",
    "guidance_scale",
    "true_cfg_scale",
    "timestamp",
    "slo_ms",
)
_TEXTS: Final = ("prompt", "text", "negative_prompt", "image_path")
_OTHERS: Final = ("image_paths", "request_id")
_NOT_PARAMETERS: Final = frozenset({"timestamp", "slo_ms"})


def read_trace(path: Path) -> tuple[list[PlannedRequest], list[str]]:
    """Return the requests of the file, in the order in which they arrived, and the keys not used.

    Raises:
        BenchRefused: The file cannot be read, or a line is not a request; the line is named.
    """
    unused: dict[str, None] = {}
    requests: list[PlannedRequest] = []
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        try:
            requests.append(_planned(row, len(requests), path.parent))
        except ValueError as error:
            raise BenchRefused(f"{where}: {error}") from None
        known = {*_WHOLE, *_NUMBERS, *_TEXTS, *_OTHERS}
        unused.update(dict.fromkeys(key for key in row if key not in known))
    if not requests:
        raise BenchRefused(f"{path} holds no request; write a line for each, as docs/benchmarks.md")
    timed = sum(request.timestamp_s is not None for request in requests)
    if timed not in {0, len(requests)}:
        raise BenchRefused(
            f"{path}: {timed} of {len(requests)} requests have a timestamp; give it to all or none"
        )
    if timed:
        requests.sort(key=lambda request: request.timestamp_s or 0.0)
    return requests, list(unused)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchRefused(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        row = _json_row(text) if text.startswith("{") else _call_row(text)
        if row is None:
            raise BenchRefused(
                f"{path}, line {number} is no request; write "
                'Request(prompt="a red circle", width=64, height=64, timestamp=0.5), or the same '
                "keys as a JSON object"
            )
        yield number, row


def _json_row(text: str) -> Mapping[str, Any] | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _call_row(text: str) -> Mapping[str, Any] | None:
    """The keywords of `Request(...)`, whose values must be literals; nothing is evaluated."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return None
        if call.func.id != "Request" or call.args:
            return None
        return {key.arg: ast.literal_eval(key.value) for key in call.keywords if key.arg}
    except (SyntaxError, ValueError, RecursionError):
        return None


def _planned(row: Mapping[str, Any], index: int, folder: Path) -> PlannedRequest:
    given = {key: value for key, value in row.items() if value is not None}
    values = {key: _whole(key, given[key]) for key in _WHOLE if key in given}
    numbers = {key: _number(key, given[key]) for key in _NUMBERS if key in given}
    for key in _TEXTS:
        if not isinstance(given.get(key, ""), str):
            raise ValueError(f"{key} is {given[key]!r}, which is not text")
    prompt = given.get("prompt") or given.get("text")
    if not prompt:
        raise ValueError("has no prompt")
    if "negative_prompt" in given:
        values["negative_prompt"] = given["negative_prompt"]
    kept = {key: value for key, value in numbers.items() if key not in _NOT_PARAMETERS}
    paths = given.get("image_paths") or [given[key] for key in ("image_path",) if key in given]
    return PlannedRequest(
        index=index,
        prompt=prompt,
        parameters={**values, **kept},
        images=tuple(folder / str(path) for path in paths),
        timestamp_s=numbers.get("timestamp"),
        slo_ms=numbers.get("slo_ms"),
    )


def _whole(key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{key} is {value!r}, which is not a whole number")
    return int(value)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} is {value!r}, which is not a number")
    return float(value)
