"""Marshmallow fields for the values of a stage file that are more than a number or a word."""

import os.path
import re
from collections.abc import Mapping
from typing import Any, Final

from marshmallow import ValidationError, fields

from configs.fields import Text

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)


_FIX: Final = (
    "give a diffusers folder (one with model_index.json) or a hub id such as Qwen/Qwen-Image"
)


def locate_model(value: str) -> str:
    """Return the absolute path of the folder that `value` names, or the hub id as it is.

    A path is relative to the current directory. Path is what begins with /, ./, ../ or ~, has no
    slash or more than one, or begins with the name of a folder that exists here.

    Raises:
        ValueError: With the reason, which begins with a verb: no such folder, or no pipeline in it.
    """
    if not _is_path(value):
        if _HUB_ID.match(value):
            return value
        raise ValueError(f"is neither a folder here nor a hub id; {_FIX}")
    # Not resolved: behind a link, the name as written is the model's name to clients.
    folder = os.path.abspath(os.path.expanduser(value))
    if not os.path.exists(folder):
        raise ValueError(f"is not there: {folder} does not exist; {_FIX}")
    if not os.path.isdir(folder):
        raise ValueError(f"is not a folder: {folder} is a file; {_FIX}")
    if not os.path.isfile(os.path.join(folder, "model_index.json")):
        raise ValueError(f"holds no pipeline: {folder} has no model_index.json; {_FIX}")
    return folder


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
        return f"is a kind of device, which belongs under engine_args.device (device: {entry})"
    if entry == "":
        return "has an empty place between its commas"
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
        return "is not a name an environment variable can have; use letters, digits and _"
    if name in _PLANNED_BY_DEVICES:
        return "cannot be set here: it is set from runtime.devices; name the devices there"
    if isinstance(content, bool) or not isinstance(content, str | int | float):
        return 'is not text; put it in quotes, such as "1"'
    if "\0" in str(content):
        return "holds a zero byte; take it out"
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
