"""Field types for the adapters of a stage file."""

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from marshmallow import ValidationError, fields

from configs.fields import Number
from configs.stage_fields import HUB_ID, existing_path

# What a request may call an adapter: letters, digits and . _ - after a letter or digit.
LORA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_LORA_ENDING: Final = ".safetensors"  # other formats are pickles, which can run code
_LORA_FIX: Final = "give a .safetensors file, a folder that holds one, or a hub id org/name"


@dataclass(frozen=True)
class LoraSource:
    """Where one adapter is: a file or folder by its absolute path, or a hub id.

    Attributes:
        path: Absolute path, or `org/name`.
        weight_name: File in the folder or repository; None where there is only one.
        revision: Branch, tag or commit of a hub id.
    """

    path: str
    weight_name: str | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return Path(self.path).is_absolute()


class LoraModules(fields.Field[dict[str, LoraSource]]):
    """Adapters by name: a path or hub id, or a mapping with `path`, `weight_name`, `revision`."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Any, **_: Any
    ) -> dict[str, LoraSource]:
        if not isinstance(value, Mapping):
            raise ValidationError("is not a mapping; write `name: path` lines beneath it")
        modules, faults = {}, {}
        for name, entry in value.items():
            try:
                modules[_lora_name(name)] = _lora_source(entry)
            except ValidationError as error:
                faults[str(name)] = error.messages
        if faults:
            raise ValidationError(faults)
        return modules


def _lora_name(name: Any) -> str:
    if not isinstance(name, str) or not LORA_NAME.match(name):
        raise ValidationError(
            "is not a name for an adapter; use up to 64 letters, digits and . _ - after a letter "
            "or digit"
        )
    return name


_CHOSEN_FIX: Final = "write a name, {name: ..., scale: 1.0}, or a list of such"
_SCALE: Final = Number(-100, 100, "weight of the adapter")


class ChosenLoras(fields.Field[list[dict[str, Any]]]):
    """Adapters of each request: a name, a mapping with `name` and `scale`, or a list of them."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Any, **_: Any
    ) -> list[dict[str, Any]]:
        entries = value if isinstance(value, list) else [value]
        chosen = [self._chosen(entry) for entry in entries]
        names = [each["name"] for each in chosen]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValidationError(f"names {twice!r} twice; give one scale for it")
        return chosen

    def _chosen(self, entry: Any) -> dict[str, Any]:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping) or not {"name"} <= entry.keys() <= {"name", "scale"}:
            raise ValidationError(f"is not an adapter; {_CHOSEN_FIX}")
        try:
            scale = _SCALE.deserialize(entry.get("scale", 1.0))
        except ValidationError as error:
            raise ValidationError(f"has a scale that {error.messages[0]}") from None
        return {"name": _lora_name(entry["name"]), "scale": scale}


def _lora_source(entry: Any) -> LoraSource:
    if isinstance(entry, str):
        entry = {"path": entry}
    known = {"path", "weight_name", "revision"}
    if not isinstance(entry, Mapping) or not entry.keys() <= known or "path" not in entry:
        raise ValidationError(f"is not text or a mapping with path; {_LORA_FIX}")
    for name, text in entry.items():
        if not isinstance(text, str) or not text.strip():
            raise ValidationError(f"has {name} {text!r}, which is not text; {_LORA_FIX}")
    weight = entry.get("weight_name", _LORA_ENDING)
    if os.path.isabs(weight) or ".." in weight.split("/") or not weight.endswith(_LORA_ENDING):
        raise ValidationError(
            f"has weight_name {weight!r}, which is not a {_LORA_ENDING} file in the folder; "
            f"{_LORA_FIX}"
        )
    path = entry["path"].strip()
    if os.path.exists(os.path.expanduser(path)) or not HUB_ID.match(path):
        path = existing_path(path, "file or folder")
        if os.path.isfile(path):
            if not path.endswith(_LORA_ENDING):
                raise ValidationError(
                    f"names {path}, which is not a {_LORA_ENDING} file; {_LORA_FIX}"
                )
            path, weight = os.path.split(path)
            return LoraSource(path, weight, entry.get("revision"))
    return LoraSource(path, entry.get("weight_name"), entry.get("revision"))
