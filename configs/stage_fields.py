"""Field types for the values of a stage file that are more than a number or a word."""

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from marshmallow import ValidationError, fields

from configs.fields import OneOf, Text

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)
_FIX: Final = (
    "give a diffusers folder (one with model_index.json) or a hub id such as Qwen/Qwen-Image"
)


_HUB_PAGE: Final = re.compile(
    r"(?P<hub>(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/)?"
    r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve|raw|commit)/(?P<revision>[^/?#]+)(?:/(?P<file>[^?#]*))?)?"
    r"/?(?:[?#].*)?\Z",
    re.ASCII,
)
_KINDS: Final = frozenset({"datasets", "spaces", "collections", "papers", "blog", "docs", "models"})


def locate_model(value: str) -> str:
    """Return the absolute path of the folder that `value` names, or the hub id that it stands for.

    A path is relative to the current directory. Path is what begins with /, ./, ../ or ~, has no
    slash or more than one, or begins with the name of a folder that exists here. The address of a
    model's page on the hub, or of a page beneath it, is its id.

    Raises:
        ValueError: With the reason, which begins with a verb: no such folder, or no pipeline in it.
    """
    if not _is_path(value):
        if HUB_ID.match(value):
            return value
        raise ValueError(f"is not a folder or a hub id; {_FIX}")
    # Not resolved: behind a link, the name as written is the model's name to clients.
    folder = os.path.abspath(os.path.expanduser(value))
    if not os.path.exists(folder):
        found = _HUB_PAGE.match(value)
        if found is not None and (found["hub"] or found["revision"]):
            return _of_page(found)
        if "://" in value:
            raise ValueError(f"is not the address of a model on the hub; {_FIX}")
        raise ValueError(f"is not a folder: {folder} does not exist; {_FIX}")
    if not os.path.isdir(folder):
        raise ValueError(f"is not a folder: {folder} is a file; {file_fix(folder) or _FIX}")
    if not os.path.isfile(os.path.join(folder, "model_index.json")):
        raise ValueError(f"is not a pipeline: {folder} has no model_index.json; {_FIX}")
    return folder


def file_fix(file: str) -> str | None:
    """Return where a file of weights belongs, which is not a model; None for any other file."""
    name = os.path.basename(file).lower()
    if name.endswith(".gguf"):
        return (
            "give the pipeline that it was made from as model, such as Qwen/Qwen-Image, and this"
            " file in quantization.gguf_file"
        )
    if not name.endswith((".safetensors", ".ckpt", ".pt", ".pth", ".bin")):
        return None
    if "lora" in name:
        return (
            "give its base model as model, such as Qwen/Qwen-Image, and this file in lora_modules"
        )
    return (
        "if it is an adapter, give its base model as model, such as Qwen/Qwen-Image, and this file"
        " in lora_modules; if it is a single checkpoint, save it as a pipeline by diffusers'"
        " from_single_file and save_pretrained"
    )


def _of_page(page: re.Match[str]) -> str:
    hub_id, revision, file = page["id"], page["revision"], page["file"]
    if hub_id.split("/")[0] in _KINDS:
        raise ValueError(f"is not the page of a model; {_FIX}")
    if file and (fix := file_fix(file)) is not None:
        raise ValueError(f"is the page of one file, {file}; {fix}")
    if revision not in {None, "main"}:
        named = revision.replace("%2F", "/")
        raise ValueError(
            f"is the page of revision {named}; write {hub_id} here and {named} in revision"
        )
    return hub_id


def _is_path(value: str) -> bool:
    first, *rest = value.split("/")
    return (
        first in {"", ".", ".."} or value.startswith("~") or len(rest) != 1 or os.path.isdir(first)
    )


_DEVICES_FIX: Final = 'write whole numbers from 0 up with commas between, such as "0,1"'
_MAX_DIGITS: Final = 9
_WHOLE: Final = re.compile(r"-?[0-9]+\Z")
_PLANNED_BY_DEVICES: Final = frozenset({"CUDA_VISIBLE_DEVICES"})


class Devices(fields.Field[tuple[int, ...]]):
    """`"0,1"`, a single number, or a list of numbers; as a tuple of distinct numbers from 0 up."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> tuple[int, ...]:
        reasons: list[str] = []
        numbers: list[int] = []
        for entry in self._entries(value):
            reason = _device_fault(entry)
            if reason:
                reasons.append(f"{reason}; {_DEVICES_FIX}")
            elif int(entry) in numbers:
                reasons.append(f"names device {int(entry)} twice; name each device once")
            else:
                numbers.append(int(entry))
        if reasons:
            raise ValidationError(list(dict.fromkeys(reasons)))
        return tuple(numbers)

    def _entries(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            entries: list[Any] = [entry.strip() for entry in value.split(",")]
            if entries == [""]:
                raise ValidationError(f"names no device; {_DEVICES_FIX}, or leave the key out")
            return entries
        if isinstance(value, list):
            if not value:
                raise ValidationError(f"names no device; {_DEVICES_FIX}, or leave the key out")
            return value
        return [value]


def _device_fault(entry: Any) -> str | None:
    """What is wrong with one entry of a device list, or None when it is a device number."""
    if isinstance(entry, str) and entry.lower() in {"cpu", "cuda", "auto"}:
        return f"is a kind of device; write it under engine_args (device: {entry})"
    if entry == "":
        return "has an empty entry"
    text = str(entry)
    if isinstance(entry, bool) or not isinstance(entry, int | str) or not _WHOLE.match(text):
        return f"names device {entry!r}, which is not a whole number"
    if text.startswith("-"):
        return f"names device {text}, which is negative"
    if len(text) > _MAX_DIGITS:
        return f"names device {text[:_MAX_DIGITS]}..., which no machine has"
    return None


class Environment(fields.Field[dict[str, str]]):
    """A mapping of variable names to texts or numbers; numbers are turned into text."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise ValidationError('is not a mapping; write NAME: "value" pairs beneath it')
        faults = {
            str(name): [fault]
            for name, content in value.items()
            if (fault := _variable_fault(name, content))
        }
        if faults:
            raise ValidationError(faults)
        return {name: str(content) for name, content in value.items()}


def _variable_fault(name: Any, content: Any) -> str | None:
    """What is wrong with one environment variable, or None when it can be set."""
    if not isinstance(name, str) or not name or not name.isprintable() or "=" in name:
        return "is not a name for an environment variable; use letters, digits and _"
    if name in _PLANNED_BY_DEVICES:
        return "cannot be set here; runtime.devices sets it"
    if isinstance(content, bool) or not isinstance(content, str | int | float):
        return 'is not text; put it in quotes, such as "1"'
    if "\0" in str(content):
        return "contains a zero byte; remove it"
    return None


class Model(Text):
    """A diffusers folder, as an absolute path, or a hub id."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> str:
        text = super()._deserialize(value, attr, data, **options)
        if not text.strip():
            return text  # left to the validator, which refuses it
        try:
            return locate_model(text.strip())
        except ValueError as error:
            raise ValidationError(str(error)) from None


class ServedNames(fields.Field[str | tuple[str, ...]]):
    """The name of a model, or a list of its names: the first is shown, clients may use each."""

    def __init__(self, example: str) -> None:
        """Take an example of a name, which messages show."""
        super().__init__()
        self._name = Text(example)

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> str | tuple[str, ...]:
        if not isinstance(value, list):
            return str(self._name.deserialize(value))
        if not value:
            raise ValidationError("is an empty list; write at least one name, or leave it out")
        return tuple(dict.fromkeys(str(self._name.deserialize(name)) for name in value))


class ExistingPath(Text):
    """A file or folder that is there, as an absolute path."""

    def __init__(self, kind: str, example: str, **options: Any) -> None:
        """Take `kind`, which is file or folder, and an example for the reader."""
        super().__init__(example, **options)
        self._kind = kind

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> str:
        text = super()._deserialize(value, attr, data, **options)
        # What is blank is left to the validator, which refuses it.
        return existing_path(text.strip(), self._kind) if text.strip() else text


def existing_path(path: str, kind: str) -> str:
    """The absolute path of what is there; refused where it is not, or is of another kind."""
    full = os.path.abspath(os.path.expanduser(path))
    right = {"file": os.path.isfile, "folder": os.path.isdir}.get(kind, os.path.exists)
    if not right(full):
        raise ValidationError(f"is not an existing {kind}: {full}; give the path of one")
    return full


_SHAPE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,4}))?\Z")
_SHAPE_FIX: Final = 'write sizes such as ["512x512", "1024x1024"], with frames "832x480x81"'


@dataclass(frozen=True)
class WarmupShape:
    """One size that is run before a replica becomes ready: pixels, and frames for a video."""

    width: int
    height: int
    num_frames: int | None = None


class WarmupShapes(fields.Field[tuple[WarmupShape, ...]]):
    """A list of `"WxH"` or `"WxHxFRAMES"`, in pixels."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Any, **_: Any
    ) -> tuple[WarmupShape, ...]:
        if not isinstance(value, list):
            raise ValidationError(f"is not a list; {_SHAPE_FIX}")
        return tuple(self._shape(entry) for entry in value)

    def _shape(self, entry: Any) -> WarmupShape:
        match = _SHAPE.match(entry) if isinstance(entry, str) else None
        if match is None:
            raise ValidationError(f"contains {entry!r}, which is not a size; {_SHAPE_FIX}")
        width, height, frames = match.groups()
        return WarmupShape(int(width), int(height), int(frames) if frames else None)


class CacheOptions(fields.Field[dict[str, Any]]):
    """Names and values for a cache's configuration; the worker knows which there are."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValidationError("is not a mapping; write `option: value` lines beneath it")
        return dict(value)


class ByPart(fields.Field[str | dict[str, str]]):
    """One word out of a few for the whole pipeline, or one for each of its parts by their names."""

    def __init__(self, *words: str) -> None:
        """Take these words."""
        super().__init__()
        self._word = OneOf(*words)

    def _deserialize(
        self, value: Any, attr: str | None, data: Any, **_: Any
    ) -> str | dict[str, str]:
        if not isinstance(value, Mapping):
            return str(self._word.deserialize(value, attr, data))
        if not value or not all(isinstance(name, str) for name in value):
            raise ValidationError("names no part; write `default: bfloat16` or `vae: float32`")
        faults, words = dict[str, list[str]](), dict[str, str]()
        for name, word in value.items():
            try:
                words[name] = str(self._word.deserialize(word))
            except ValidationError as fault:
                faults[name] = [str(each) for each in fault.messages]
        if faults:
            raise ValidationError(dict(faults))
        return words
