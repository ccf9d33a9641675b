"""Marshmallow fields of the settings of a pipeline that are more than a number or a word.

They know the form of warm-up sizes, quantization and adapters; not which of them a model can take.
"""

import os.path
import re
from collections.abc import Mapping
from typing import Any, Final

from marshmallow import ValidationError, fields, post_load, pre_load, validate

from configs.field_types import OneOf, Text
from configs.pipeline_settings import (
    QUANTIZATION_METHODS,
    LoraSource,
    Quantization,
    WarmupShape,
)
from configs.section_schema import SectionSchema

_SHAPE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,4}))?\Z")
_SHAPE_MEND: Final = 'write sizes such as ["512x512", "1024x1024"], with frames "832x480x81"'
# What a request may call an adapter: it stands in URLs, logs and file names of no one.
LORA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)
# Other formats are pickles, which can run code.
_LORA_ENDING: Final = ".safetensors"
_LORA_MEND: Final = "give a .safetensors file, a folder that holds one, or a hub id org/name"


class Flag(fields.Boolean):
    """true or false, and no word or number instead."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> bool:
        if not isinstance(value, bool):
            raise ValidationError("is neither true nor false; write one of the two")
        return value


class WarmupShapes(fields.Field[tuple[WarmupShape, ...]]):
    """A list of `"WxH"` or `"WxHxFRAMES"`, in pixels."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Any, **_: Any
    ) -> tuple[WarmupShape, ...]:
        if not isinstance(value, list):
            raise ValidationError(f"is not a list; {_SHAPE_MEND}")
        return tuple(self._shape(entry) for entry in value)

    def _shape(self, entry: Any) -> WarmupShape:
        match = _SHAPE.match(entry) if isinstance(entry, str) else None
        if match is None:
            raise ValidationError(f"holds {entry!r}, which is no size; {_SHAPE_MEND}")
        width, height, frames = match.groups()
        return WarmupShape(int(width), int(height), int(frames) if frames else None)


class CacheOptions(fields.Field[dict[str, Any]]):
    """Names and values for a cache's configuration; the worker knows which there are."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValidationError("is not a mapping; write `option: value` lines beneath it")
        return dict(value)


class ExistingPath(Text):
    """A file or folder that is there, as an absolute path."""

    def __init__(self, kind: str, example: str, **options: Any) -> None:
        """Take `kind`, which is file or folder, and an example for the reader."""
        super().__init__(example, **options)
        self._kind = kind

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> str:
        text = super()._deserialize(value, attr, data, **options)
        # What is blank is left to the validator, which refuses it.
        return _existing(text.strip(), self._kind) if text.strip() else text


class QuantizationSchema(SectionSchema):
    """`engine_args.quantization`: a word, or a mapping with `method`."""

    section = "under engine_args.quantization"

    method = OneOf(*QUANTIZATION_METHODS, required=True)
    components = fields.List(Text("transformer"), validate=validate.Length(min=1))
    gguf_file = ExistingPath("file", "./models/flux1-dev-Q4_K_S.gguf")

    @pre_load
    def _take_a_word(self, data: Any, **_: Any) -> Any:
        return {"method": data} if isinstance(data, str) else data

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> Quantization:
        file = data.get("gguf_file")
        if (data["method"] == "gguf") != (file is not None):
            reason = "is needed by method gguf, and by that alone"
            raise ValidationError({"gguf_file": [reason]})
        return Quantization(**{**data, "components": tuple(data.get("components", ()))})


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
            "is no name for an adapter; use letters, digits and . _ - after a letter or digit, "
            "64 at most"
        )
    return name


def _lora_source(entry: Any) -> LoraSource:
    if isinstance(entry, str):
        entry = {"path": entry}
    known = {"path", "weight_name", "revision"}
    if not isinstance(entry, Mapping) or not entry.keys() <= known or "path" not in entry:
        raise ValidationError(f"is neither text nor a mapping with path; {_LORA_MEND}")
    for name, text in entry.items():
        if not isinstance(text, str) or not text.strip():
            raise ValidationError(f"has {name} {text!r}, which is not text; {_LORA_MEND}")
    weight = entry.get("weight_name", _LORA_ENDING)
    if os.path.isabs(weight) or ".." in weight.split("/") or not weight.endswith(_LORA_ENDING):
        raise ValidationError(
            f"has weight_name {weight!r}, which is no {_LORA_ENDING} file in the folder; "
            f"{_LORA_MEND}"
        )
    path = entry["path"].strip()
    if os.path.exists(os.path.expanduser(path)) or not _HUB_ID.match(path):
        path = _existing(path, "file or folder")
        if os.path.isfile(path):
            if not path.endswith(_LORA_ENDING):
                raise ValidationError(
                    f"names {path}, which is no {_LORA_ENDING} file; {_LORA_MEND}"
                )
            path, weight = os.path.split(path)
            return LoraSource(path, weight, entry.get("revision"))
    return LoraSource(path, entry.get("weight_name"), entry.get("revision"))


def _existing(path: str, kind: str) -> str:
    """The absolute path of what is there; refused where it is not, or is of another kind."""
    full = os.path.abspath(os.path.expanduser(path))
    right = {"file": os.path.isfile, "folder": os.path.isdir}.get(kind, os.path.exists)
    if not right(full):
        raise ValidationError(f"names no {kind} that is there: {full}; give the path of one")
    return full
