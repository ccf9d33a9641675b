"""Input images of one request: decoded from its files, and laid on the size of its output.

Does not know where the files are kept, nor any pipeline.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from PIL import Image, ImageOps

from configs.errors import InputUnavailable
from routing.parameters import Parameters

_OPAQUE = 255


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a pipeline gets besides words and numbers.

    Attributes:
        images: RGB, upright, on white where the file is transparent, in the order of the request.
        mask: Mode L, upright; white is painted anew, black stays. Where the file has transparent
            parts these alone are white.
    """

    images: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None

    @classmethod
    def read(cls, parameters: Parameters, read: Callable[[str], bytes]) -> Self:
        """Decode the files that `parameters` name, which `read` returns.

        Raises:
            InputUnavailable: One is gone, can not be read, or is no image.
        """
        mask = parameters.mask_image
        return cls(
            images=tuple(_decoded(name, read, "RGB") for name in parameters.image),
            mask=None if mask is None else _decoded(mask, read, "L"),
        )

    def fitted(self, width: int, height: int) -> Self:
        """Return them at `width` x `height` pixels.

        Each is scaled until it covers the size, keeping its proportions, and what stands over is
        cut off evenly at both sides. Image and mask of equal size stay in register.
        """
        size = (width, height)
        mask = self.mask
        return type(self)(
            images=tuple(
                ImageOps.fit(each, size, Image.Resampling.LANCZOS) for each in self.images
            ),
            mask=None if mask is None else ImageOps.fit(mask, size, Image.Resampling.LANCZOS),
        )

    def at_least(self, side: int) -> Self:
        """Return them with no side below so many pixels; smaller ones are enlarged."""
        return type(self)(tuple(_enlarged(each, side) for each in self.images), self.mask)


def _enlarged(image: Image.Image, side: int) -> Image.Image:
    if min(image.size) >= side:
        return image
    factor = side / min(image.size)
    size = (round(image.width * factor), round(image.height * factor))
    return image.resize(size, Image.Resampling.LANCZOS)


def _decoded(name: str, read: Callable[[str], bytes], mode: str) -> Image.Image:
    fault: str
    try:
        with Image.open(io.BytesIO(read(name))) as file:
            upright: Any = ImageOps.exif_transpose(file)
            return _as_mask(upright) if mode == "L" else _on_white(upright)
    except FileNotFoundError:
        fault = "it is gone from the output store"
    except Exception as error:  # noqa: BLE001 - any decoder and any file system may fail here
        fault = f"{type(error).__name__}: {error}"
    raise InputUnavailable(f"the input image {name} can not be read: {fault}")


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")


def _as_mask(image: Image.Image) -> Image.Image:
    # Masks as OpenAI takes them are the picture itself with a hole.
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.histogram()[_OPAQUE] < alpha.width * alpha.height:
            return ImageOps.invert(alpha)
    return image.convert("L")
