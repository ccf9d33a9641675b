"""How the parameters and input images of a request become the arguments of a pipeline's call."""

import functools
import inspect
import io
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from configs.errors import InputUnavailable
from configs.parameters import ARGUMENTS, Parameters
from workers.families import (
    FRAME_COUNTS,
    FRAME_RATES,
    OUTPUT_COUNTS,
    family_of,
    given_arguments,
)

_OPAQUE = 255


# What white may be in greys of more than 8 bits, by how the mode begins. Floats and 32-bit integers
# do not say: it is the least of these that holds all levels.
_WHITES = {"I;16": (65_535,), "I": (255, 65_535, 2**31 - 1), "F": (1, 255, 65_535)}


# PNG of other depths: bytes for one level of the file, by the raw mode of Pillow.
_KEY_SCALES = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}


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
            InputUnavailable: One is gone, cannot be read, or is no image.
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
            upright: Any = ImageOps.exif_transpose(_in_bytes(file))
            return _as_mask(upright) if mode == "L" else _on_white(upright)
    except FileNotFoundError:
        fault = "the output store no longer has it"
    except Exception as error:  # noqa: BLE001 - any decoder and any file system may fail here
        fault = f"{type(error).__name__}: {error}"
    raise InputUnavailable(f"the input image {name} cannot be read: {fault}")


def _in_bytes(file: Any) -> Any:
    """Return a picture of 8 bits a channel; Pillow itself clips greys of more at 255."""
    tiles = file.tile
    file.load()
    raw, key = tiles[0].args if tiles else None, file.info.get("transparency")
    if isinstance(raw, str) and raw in _KEY_SCALES and isinstance(key, int | tuple):
        # The transparent colour is told in the levels of the file, the pixels are in bytes already.
        scale = _KEY_SCALES[raw]
        keys = key if isinstance(key, tuple) else (key,)
        scaled = tuple(int(level * scale) for level in keys)
        file.info["transparency"] = scaled if isinstance(key, tuple) else scaled[0]
    whites = next((whites for start, whites in _WHITES.items() if file.mode.startswith(start)), ())
    if not whites:
        return file
    levels = np.nan_to_num(np.asarray(file, np.float32))
    most = float(levels.max())
    white = next((each for each in whites if most <= each), most)
    shown = Image.fromarray((levels / white * _OPAQUE).round().clip(0, _OPAQUE).astype(np.uint8))
    if isinstance(key, int):
        shown.putalpha(Image.fromarray(np.where(levels == key, 0, _OPAQUE).astype(np.uint8)))
    if orientation := file.getexif().get(ExifTags.Base.Orientation):
        shown.getexif()[ExifTags.Base.Orientation] = orientation
    return shown


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
    return image.convert("RGB").convert("L")


# Pixels; editing pipelines round sizes down, and a smaller image would vanish.
_SMALLEST_EDITED = 128


# What the cards of Qwen-Image give; some encoders fail on text without any token.
_NO_WORDS = " "


def arguments_of(pipeline_class: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a pipeline's call, by name."""
    return _parameters(pipeline_class.__call__)


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def default_of(arguments: Mapping[str, inspect.Parameter], name: str) -> Any:
    """Return the default of an argument; None where there is no such argument or default."""
    parameter = arguments.get(name)
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return None
    return parameter.default


def default_negative_prompt(
    arguments: Mapping[str, inspect.Parameter], true_cfg_scale: float | None
) -> str | None:
    """Return the negative prompt of a call that is given none.

    Where `true_cfg_scale` is the guidance, pipelines leave it out without a negative prompt; one
    with nothing in it turns it on.
    """
    scale = default_of(arguments, "true_cfg_scale") if true_cfg_scale is None else true_cfg_scale
    guided = "negative_prompt" in arguments and scale is not None and scale > 1
    return _NO_WORDS if guided else None


def _really_guided(parameters: Parameters, taken: Mapping[str, inspect.Parameter]) -> Parameters:
    if parameters.negative_prompt is not None:
        return parameters
    negative = default_negative_prompt(taken, parameters.true_cfg_scale)
    return parameters.with_changes({"negative_prompt": negative})


def call_arguments(
    parameters: Parameters, pipeline_class: Any, inputs: Inputs | None = None
) -> dict[str, Any]:
    """Return the arguments for a call of a pipeline of that class."""
    taken, family = arguments_of(pipeline_class), family_of(pipeline_class)
    if "true_cfg_scale" in taken:
        parameters = _really_guided(parameters, taken)
    arguments: dict[str, Any] = {
        "prompt": parameters.prompt,
        "num_inference_steps": parameters.num_inference_steps,
        "generator": [torch.Generator("cpu").manual_seed(seed) for seed in parameters.seeds()],
        "output_type": "np",
    }
    for name in ("width", "height", *ARGUMENTS):
        if name in taken and getattr(parameters, name) is not None:
            arguments[name] = getattr(parameters, name)
    if family.needs_negative_prompt:
        arguments.setdefault("negative_prompt", "")
    if parameters.num_frames is not None:
        arguments |= dict.fromkeys(set(FRAME_COUNTS) & set(taken), parameters.num_frames)
    if parameters.fps is not None:
        arguments |= dict.fromkeys(set(FRAME_RATES) & set(taken), parameters.fps)
    if family.one_generator and len(arguments["generator"]) == 1:
        arguments["generator"] = arguments["generator"][0]
    arguments |= given_arguments(parameters, taken)
    arguments |= _input_arguments(parameters, pipeline_class, inputs or Inputs())
    if "padding_mask_crop" in arguments:  # what was painted is pasted into the picture
        arguments["output_type"] = "pil"
    return arguments | _count_arguments(parameters, taken)


def left_out(parameters: Parameters, pipeline_class: Any) -> list[str]:
    """Return the parameters that are set and that the pipeline does not take."""
    taken = arguments_of(pipeline_class)
    return [
        name for name in ARGUMENTS if name not in taken and getattr(parameters, name) is not None
    ]


def is_edit(taken: Collection[str]) -> bool:
    """Tell whether an image pipeline reads its image, rather than starting from its pixels."""
    return "image" in taken and not {"strength", "mask_image", *FRAME_COUNTS} & set(taken)


def _input_arguments(parameters: Parameters, pipeline_class: Any, inputs: Inputs) -> dict[str, Any]:
    if not inputs.images:
        return {}
    taken, copies = arguments_of(pipeline_class), 1
    if is_edit(taken):
        if family_of(pipeline_class).as_large_as_image:
            inputs = inputs.fitted(parameters.width, parameters.height)
        inputs = inputs.at_least(_SMALLEST_EDITED)
    else:
        # Those that start from the pixels would stretch them, or make another size than asked.
        inputs = inputs.fitted(parameters.width, parameters.height)
        if not family_of(pipeline_class).one_image_for_all:
            # One image for all outputs would be encoded with the generator of the first, which
            # then gives the outputs other noise than each has alone.
            copies = parameters.num_outputs_per_prompt
    images = inputs.images * copies
    arguments: dict[str, Any] = {"image": images[0] if len(images) == 1 else list(images)}
    if inputs.mask is not None:
        arguments["mask_image"] = inputs.mask if copies == 1 else [inputs.mask] * copies
    return arguments


def _count_arguments(parameters: Parameters, taken: Collection[str]) -> dict[str, Any]:
    count = parameters.num_outputs_per_prompt
    for name in OUTPUT_COUNTS:
        if name in taken:
            return {name: count}
    if count == 1:
        return {}
    lists: dict[str, Any] = {"prompt": [parameters.prompt] * count}
    if "negative_prompt" in taken and parameters.negative_prompt is not None:
        lists["negative_prompt"] = [parameters.negative_prompt] * count
    return lists
