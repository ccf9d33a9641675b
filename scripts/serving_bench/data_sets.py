"""The data sets: made-up prompts, a file of prompts, or a trace."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final

from PIL import Image

from scripts.serving_bench.options import IMAGE_TASKS, Options
from scripts.serving_bench.requests import BenchRefused, PlannedRequest

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
        raise BenchRefused(
            f"{path} is empty; write a line for each request, as docs/benchmarks.md shows"
        )
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
                f"{path}, line {number} is not a request; write "
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


_COLOURS: Final = ("red", "green", "blue", "yellow", "white", "black", "orange", "purple")
_THINGS: Final = ("circle", "square", "star", "heart", "triangle", "ring")
_PROFILE_SEED: Final = 42
_INPUT_SIDE: Final = 512


def planned_requests(options: Options) -> tuple[list[PlannedRequest], list[str]]:
    """Return the requests of the data set and what there is to say about them.

    Raises:
        BenchRefused: The data set's file is refused.
    """
    notes: list[str] = []
    if options.dataset == "trace":
        requests, unused = read_trace(_path(options))
        requests = [_laid_over(request, options) for request in requests[: options.num_prompts]]
        if unused:
            notes.append(f"Keys of the trace that are not used: {', '.join(unused)}")
    elif options.dataset == "vbench":
        requests = _made_up(options, _lines(_path(options)))
    else:
        requests = _made_up(options, None)
    return _with_images(requests, options), notes


def _path(options: Options) -> Path:
    if options.dataset_path is None:
        raise BenchRefused(
            f"the data set {options.dataset!r} needs --dataset-path; nothing is downloaded"
        )
    return options.dataset_path


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchRefused(f"{path} cannot be read: {error}") from None
    found = [line for line in lines if line]
    if not found:
        raise BenchRefused(f"{path} is empty; write one prompt in each line")
    return found


def _made_up(options: Options, prompts: Sequence[str] | None) -> list[PlannedRequest]:
    profiles = _profiles(options)
    requests = []
    for index in range(options.requests_made_up):
        prompt = prompts[index % len(prompts)] if prompts else _prompt(index)
        own: dict[str, Any] = dict(options.parameters)
        if options.enable_negative_prompt:
            own["negative_prompt"] = f"blurry, faint, number {index}"
        if options.seed is not None:
            own["seed"] = options.seed + index
        requests.append(PlannedRequest(index, prompt, {**own, **profiles[index]}))
    return requests


def _prompt(index: int) -> str:
    """Such as the bundled model can draw, and no two of the first 336 alike."""
    first = _COLOURS[index % len(_COLOURS)]
    thing = _THINGS[index // len(_COLOURS) % len(_THINGS)]
    others = [colour for colour in _COLOURS if colour != first]
    ground = others[index // (len(_COLOURS) * len(_THINGS)) % len(others)]
    return f"a {first} {thing} on a {ground} background"


def _profiles(options: Options) -> list[Mapping[str, Any]]:
    """For each request the profile that was drawn for it; always the same draw."""
    if not options.random_request_config:
        return [{}] * options.requests_made_up
    drawn = random.Random(_PROFILE_SEED).choices(
        options.random_request_config,
        weights=[profile.get("weight", 1) for profile in options.random_request_config],
        k=options.requests_made_up,
    )
    return [{key: profile[key] for key in profile if key != "weight"} for profile in drawn]


def _laid_over(request: PlannedRequest, options: Options) -> PlannedRequest:
    """The size of the command line counts for all; its other values for rows without their own."""
    size = {
        key: options.parameters[key] for key in ("width", "height") if key in options.parameters
    }
    return replace(request, parameters={**options.parameters, **request.parameters, **size})


def _with_images(requests: list[PlannedRequest], options: Options) -> list[PlannedRequest]:
    if options.task not in IMAGE_TASKS:
        return requests
    if options.dataset == "trace":
        for request in requests:
            if not request.images:
                raise BenchRefused(
                    f"the task {options.task} needs an image; give request {request.index} of the "
                    "trace an image_path"
                )
        return requests
    white = [_white_image(number) for number in range(options.num_input_images)]
    return [replace(request, images=tuple(white)) for request in requests]


def _white_image(number: int) -> Path:
    path = Path(gettempdir()) / f"diffusion_replicas_bench_{number}.png"
    Image.new("RGB", (_INPUT_SIDE, _INPUT_SIDE), "white").save(path)
    return path
