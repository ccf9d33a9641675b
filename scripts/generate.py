"""Make a picture or a video from the command line: ``python -m scripts.generate "a red circle"``.

Submits one request to a running service, follows it with a progress bar, and writes its outputs.
Ctrl-C cancels it. It needs only the API.

Exit codes: 0, the outputs are written; 1, the request failed or was refused; 2, a wrong command
line; 130, it was canceled by Ctrl-C.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import mimetypes
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from configs.errors import ConfigurationError
from configs.fields import choices
from configs.parameters import MEDIA_TYPES
from configs.settings import load_settings
from scripts.api_client import ApiClient, FollowedRequest, NoAnswer, Refused, complain, say
from scripts.launcher.parts import base_url, reachable

_FORMATS: Final = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}
_CANCELED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the outputs; return the exit code."""
    try:
        parser = _parser()
    except ConfigurationError as refused:
        complain(str(refused))
        return 2
    options = parser.parse_args(arguments)
    try:
        body = _body(options)
    except (OSError, ValueError) as error:
        complain(str(error))
        return 2
    followed = None
    try:
        api = ApiClient(options.url.rstrip("/"), options.api_key)
        followed = FollowedRequest(api, api.submit(body, secrets.token_hex(16)))
        ended = followed.to_end()
        return _report(api, ended, options.output)
    except (NoAnswer, Refused, OSError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        if followed is not None:
            with contextlib.suppress(NoAnswer, Refused):
                api.cancel(followed.id)
                complain(f"{followed.id} is canceled.")
        return _CANCELED


def _report(api: ApiClient, ended: dict[str, Any], output: Path | None) -> int:
    if ended["status"] != "succeeded":
        reason = (ended.get("error") or {}).get("message", "")
        complain(f"{ended['id']} is {ended['status']}. {reason}".rstrip())
        return 1
    for warning in ended["warnings"]:
        complain(f"Warning: {warning}")
    names = _names(output, ended)
    for path, made in zip(names, ended["outputs"], strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(api.file(made["url"]))
        size = f"{made['width']}x{made['height']}"
        say(f"{path}  {size}, seed {made['seed']}, {made['bytes']:,} bytes")
    timings = ended["timings"]
    parts = [
        f"{name} {timings[f'{key}_s']:.2f} s"
        for name, key in (
            ("waited", "queued"),
            ("encode", "encode"),
            ("denoise", "denoise"),
            ("decode", "decode"),
            ("store", "store"),
            ("total", "total"),
        )
        if timings.get(f"{key}_s") is not None
    ]
    say(f"{ended['model']} on {ended['replica']}: {', '.join(parts)}")
    return 0


def _names(output: Path | None, ended: dict[str, Any]) -> list[Path]:
    """Where the outputs go: as asked, with a number before the suffix where there are several."""
    outputs = ended["outputs"]
    suffixes = {media: form for form, media in MEDIA_TYPES.items()}
    if output is None:
        return [
            Path(f"{ended['id']}-{made['seed']}.{suffixes[made['media_type']]}") for made in outputs
        ]
    if len(outputs) == 1:
        return [output]
    return [output.with_stem(f"{output.stem}-{index}") for index in range(len(outputs))]


def _body(options: argparse.Namespace) -> dict[str, Any]:
    fields = {
        "prompt": options.prompt,
        "negative_prompt": options.negative_prompt,
        "model": options.model,
        "size": options.size,
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance_scale,
        "num_outputs_per_prompt": options.num_outputs,
        "seed": options.seed,
        "scheduler": options.scheduler,
        "strength": options.strength,
        "num_frames": options.frames,
        "fps": options.fps,
        "priority": options.priority,
        "image": [_data_url(path) for path in options.image] or None,
        "mask_image": _data_url(options.mask) if options.mask else None,
        "lora": [_lora(text) for text in options.lora] or None,
    }
    if options.output is not None:
        form = _FORMATS.get(options.output.suffix.lower())
        if form is None:
            raise ValueError(
                f"-o {options.output}: {options.output.suffix!r} is not a supported format; "
                f"use {choices(_FORMATS)}"
            )
        fields["output_format"] = form
    return {name: value for name, value in fields.items() if value is not None}


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _lora(text: str) -> dict[str, Any]:
    name, separator, scale = text.rpartition(":")
    if not separator:
        return {"name": text}
    try:
        return {"name": name, "scale": float(scale)}
    except ValueError:
        raise ValueError(f"--lora {text}: {scale!r} is not a number; write name:0.8") from None


def _parser() -> argparse.ArgumentParser:
    settings = load_settings()
    url = base_url(reachable(settings.api_host), settings.api_port)
    parser = argparse.ArgumentParser(
        prog="python -m scripts.generate",
        description="Make a picture or a video on a running service.",
        epilog="What is left out is the model's default; GET /v1/models shows those.",
    )
    add = parser.add_argument
    add("prompt", help="what the output should show")
    add("-o", "--output", type=Path, metavar="FILE", help="default: named by request and seed")
    add("--negative-prompt", metavar="TEXT", help="what it should not show")
    add("--model", help="which model; needed where there are several")
    add("--size", metavar="WxH", help="pixels, such as 1024x1024")
    add("--steps", type=int, help="denoising steps")
    add("--guidance-scale", type=float, metavar="G", help="weight of the prompt")
    add("--num-outputs", "-n", type=int, metavar="N", help="outputs; output k has seed + k")
    add("--seed", type=int, help="default: random")
    add("--scheduler", metavar="CLASS", help="noise scheduler")
    add("--image", type=Path, action="append", default=[], metavar="FILE", help="input image")
    add("--mask", type=Path, metavar="FILE", help="mask; white parts are painted anew")
    add("--strength", type=float, help="how much of the image is made anew, 0 to 1")
    add("--frames", type=int, help="frames of a video")
    add("--fps", type=float, help="frames in a second of a video")
    add("--lora", action="append", default=[], metavar="NAME[:SCALE]", help="adapter")
    add("--priority", choices=("high", "normal", "low"))
    add("--url", default=url, help="the API (default: %(default)s)")
    add("--api-key", default=settings.api_key, metavar="KEY", help="default: API_KEY")
    return parser


if __name__ == "__main__":
    sys.exit(main())
