"""Pictures as the tests of the API send them, and models that take them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from werkzeug.test import TestResponse

from configs.settings import Settings
from tests.integration.api_world import (
    ABILITIES,
    Api,
)
from tests.pictures import picture

EDITING = replace(
    ABILITIES, tasks=("text-to-image", "image-to-image", "inpaint"), max_images=2, strength=True
)
VIDEO = replace(
    ABILITIES,
    tasks=("text-to-video", "image-to-video"),
    max_images=1,
    default_frames=9,
    frames_step=4,
    max_frames=81,
    default_fps=8.0,
)

RED, BLUE = picture(48, 32), picture(48, 32, color="blue")


MASK = picture(48, 32, color="white")


def files(settings: Settings, request_id: str) -> list[str]:
    folder = Path(settings.outputs_url.removeprefix("file://")) / request_id
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def send_form(api: Api, **fields: Any) -> TestResponse:
    data = {"prompt": "a red circle", **fields}
    return api.client.post("/v1/requests", data=data, content_type="multipart/form-data")


def file(data: bytes, name: str = "any.bin") -> tuple[io.BytesIO, str]:
    return io.BytesIO(data), name
