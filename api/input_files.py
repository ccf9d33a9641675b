"""The input files of requests: names in the output store, and what their names say.

An input lies beside the outputs of its request, so that it is removed with them. Its name holds its
size, so that nobody has to open it to know that. Does not know HTTP, nor what is in a file.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from redis.exceptions import RedisError

from api.input_images import InputImage
from configs.errors import OutputWriteFailed, StoreUnavailable
from routing.output_store import OutputStore
from routing.parameters import Parameters
from routing.router import Router

_SIZE: Final = re.compile(r"-([0-9]+)x([0-9]+)-[0-9a-f]+\.[a-z]+\Z")
_RETRY_S: Final = 5.0


def input_names(request_id: str, kind: str, images: Sequence[InputImage]) -> tuple[str, ...]:
    """Return new names for the inputs of a request; `kind` is `input` or `mask`."""
    # A new token for each edit: the replica may be reading what was there before.
    token = secrets.token_hex(4)
    return tuple(
        f"{request_id}/{kind}-{index}-{image.width}x{image.height}-{token}.{image.format}"
        for index, image in enumerate(images)
    )


def input_size(name: str) -> tuple[int, int]:
    """Return width and height in pixels of the input of that name."""
    match = _SIZE.search(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of an input")
    return int(match[1]), int(match[2])


def all_inputs(parameters: Parameters) -> tuple[str, ...]:
    """Return the names of all inputs of a request: its images, then its mask."""
    mask = parameters.mask_image
    return (*parameters.image, *((mask,) if mask else ()))


@contextmanager
def stored(router: Router, request_id: str, files: Mapping[str, bytes]) -> Iterator[None]:
    """Store files before what refers to them; where that fails they are removed again.

    Not where Redis did not answer, since what refers to them may be recorded: they are removed with
    the request, or by :meth:`Router.withdraw`. Should this process die, the sweep does it.

    Raises:
        StoreUnavailable: They could not be written.
        redis.RedisError: Redis did not answer.
    """
    if not files:
        yield
        return
    outputs, written = router.outputs, list[str]()
    router.loose.note(request_id)
    try:
        for name, data in files.items():
            _write(outputs, name, data)
            written.append(name)
        yield
    except RedisError:
        raise
    except BaseException:
        # What went wrong first is what the client is told; what stays is the sweep's.
        with suppress(OSError, RedisError):
            for name in written:
                outputs.remove_file(name)
            router.loose.strike(request_id)
        raise


def _write(outputs: OutputStore, name: str, data: bytes) -> None:
    try:
        outputs.write(name, data)
    except OutputWriteFailed as failed:
        raise StoreUnavailable(
            "The input images could not be stored; nothing was recorded, send it again.",
            retry_after=_RETRY_S,
        ) from failed
