"""The data sets: made-up prompts, a file of prompts, or a trace.

The same options give the same requests. Does not know when a request is sent, nor how.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final

from PIL import Image

from scripts.serving_bench.options import IMAGE_TASKS, Options
from scripts.serving_bench.planned_request import BenchRefused, PlannedRequest
from scripts.serving_bench.trace import read_trace

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
            f"the data set {options.dataset!r} needs --dataset-path: nothing is downloaded here"
        )
    return options.dataset_path


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchRefused(f"{path} cannot be read: {error}") from None
    found = [line for line in lines if line]
    if not found:
        raise BenchRefused(f"{path} holds no prompt; write one in each line")
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
                    f"the task {options.task} needs an image, and request {request.index} of the "
                    "trace names none; give it image_path"
                )
        return requests
    white = [_white_image(number) for number in range(options.num_input_images)]
    return [replace(request, images=tuple(white)) for request in requests]


def _white_image(number: int) -> Path:
    path = Path(gettempdir()) / f"diffusion_replicas_bench_{number}.png"
    Image.new("RGB", (_INPUT_SIDE, _INPUT_SIDE), "white").save(path)
    return path
