"""The output writer: what a generation made becomes files in the output store, all of them or none.

Does not know records, nor what becomes of a request whose outputs could not be written.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from PIL import Image

from routing.formats import MEDIA_TYPES
from routing.outcome import Output
from routing.output_store import OutputStore
from routing.record import Request
from workers.engine.generation import Generation, Video
from workers.images import encode
from workers.videos import encode_video

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputWriter:
    """Writes outputs to a store, with how they were made in them where ``metadata`` says so."""

    store: OutputStore
    metadata: bool

    def write(self, request: Request, generation: Generation) -> tuple[Output, ...]:
        """Store all outputs of an attempt and return what the record is to say of them.

        Raises:
            OutputWriteFailed: One could not be stored; none is left there.
        """
        written: list[Output] = []
        try:
            made: tuple[Image.Image | Video, ...] = generation.videos or generation.images
            for index, (each, seed) in enumerate(zip(made, generation.seeds, strict=True)):
                written.append(self._write_one(request, index, each, seed, generation.scheduler))
        except BaseException:
            self.remove(written)
            raise
        return tuple(written)

    def remove(self, outputs: Iterable[Output]) -> None:
        """Remove files that count for nothing; what the store does not remove goes with the rest.

        All files of a request go with its record.
        """
        for output in outputs:
            try:
                self.store.remove_file(output.name)
            except Exception as error:  # noqa: BLE001 - any file system may fail in its own way
                _logger.warning("%s could not be removed: %s", output.name, error)

    def _write_one(
        self, request: Request, index: int, made: Image.Image | Video, seed: int, scheduler: str
    ) -> Output:
        form = request.parameters.output_format
        data = self._encoded(request, made, seed, scheduler)
        name = f"{request.id}/{request.attempt}-{index}.{form}"
        self.store.write(name, data)
        width, height = made.size
        return Output(
            name=name,
            media_type=MEDIA_TYPES[form],
            width=width,
            height=height,
            seed=seed,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            num_frames=made.num_frames if isinstance(made, Video) else None,
            fps=made.fps if isinstance(made, Video) else None,
        )

    def _encoded(
        self, request: Request, made: Image.Image | Video, seed: int, scheduler: str
    ) -> bytes:
        parameters, model, metadata = request.parameters, request.model, self.metadata
        if isinstance(made, Video):
            return encode_video(
                made, parameters, seed, model, scheduler=scheduler, metadata=metadata
            )
        return encode(made, parameters, seed, model, scheduler=scheduler, metadata=metadata)
