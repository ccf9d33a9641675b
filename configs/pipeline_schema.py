"""The keys of `engine_args` that make a pipeline smaller or faster, and its adapters."""

import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any, Final

from marshmallow import ValidationError, fields, post_load, pre_load, validate, validates_schema

from configs.fields import Flag, OneOf, SectionSchema, Text, Whole
from configs.stage_config import (
    CACHE_BACKENDS,
    QUANTIZATION_METHODS,
    LoraSource,
    PipelineSettings,
    Quantization,
    WarmupShape,
)

_SHAPE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,4}))?\Z")


_SHAPE_FIX: Final = 'write sizes such as ["512x512", "1024x1024"], with frames "832x480x81"'


# What a request may call an adapter: it stands in URLs, logs and file names of no one.
LORA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)


# Other formats are pickles, which can run code.
_LORA_ENDING: Final = ".safetensors"


_LORA_FIX: Final = "give a .safetensors file, a folder that holds one, or a hub id org/name"


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
            raise ValidationError(f"holds {entry!r}, which is no size; {_SHAPE_FIX}")
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
        raise ValidationError(f"is neither text nor a mapping with path; {_LORA_FIX}")
    for name, text in entry.items():
        if not isinstance(text, str) or not text.strip():
            raise ValidationError(f"has {name} {text!r}, which is not text; {_LORA_FIX}")
    weight = entry.get("weight_name", _LORA_ENDING)
    if os.path.isabs(weight) or ".." in weight.split("/") or not weight.endswith(_LORA_ENDING):
        raise ValidationError(
            f"has weight_name {weight!r}, which is no {_LORA_ENDING} file in the folder; "
            f"{_LORA_FIX}"
        )
    path = entry["path"].strip()
    if os.path.exists(os.path.expanduser(path)) or not _HUB_ID.match(path):
        path = _existing(path, "file or folder")
        if os.path.isfile(path):
            if not path.endswith(_LORA_ENDING):
                raise ValidationError(f"names {path}, which is no {_LORA_ENDING} file; {_LORA_FIX}")
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


_OFFLOADS: Final = ("enable_cpu_offload", "enable_layerwise_offload")


_MOST_BYTES: Final = 2**40


_KEEPS_STATE: Final = (
    "keeps state from step to step of one request, so that requests cannot share steps; "
    "set max_num_seqs to 1"
)


_MOVES_PARTS: Final = (
    "moves whole parts to and fro, which requests that share steps would do to each other; "
    "set max_num_seqs to 1, or use enable_layerwise_offload"
)


_COMPILES_ANEW: Final = (
    "does not go with adapters (lora_dir, lora_modules), each of which would compile anew; "
    "take one out"
)


class PipelineSettingsSchema(SectionSchema):
    """The part of `engine_args` that ends in :class:`PipelineSettings`."""

    section = "under engine_args"

    vae_use_slicing = Flag()
    vae_use_tiling = Flag()
    enable_cpu_offload = Flag()
    enable_layerwise_offload = Flag()
    quantization = fields.Nested(QuantizationSchema)
    cache_backend = OneOf("none", *CACHE_BACKENDS)
    cache_config = CacheOptions()
    attention_backend = Text("native")
    channels_last = Flag()
    diffusion_compile_granularity = OneOf("none", "regional")
    diffusion_compile_dynamic = Flag()
    warmup_shapes = WarmupShapes()
    lora_dir = ExistingPath("folder", "./loras")
    lora_modules = LoraModules()
    max_cpu_loras = Whole(1, 1024, "adapters")
    enable_prompt_embed_cache = Flag()
    prompt_embed_cache_bytes = Whole(1, _MOST_BYTES, "bytes")

    @validates_schema
    def _refuse_pairs(self, data: Mapping[str, Any], **_: Any) -> None:
        faults = dict(_pair_faults(data))
        if faults:
            raise ValidationError({key: [fault] for key, fault in faults.items()})


def split_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Return loaded `engine_args` with the settings of the pipeline put together as `pipeline`."""
    names = {field.name for field in dataclass_fields(PipelineSettings)}
    settings = {name: value for name, value in data.items() if name in names}
    if settings.get("cache_backend") == "none":
        del settings["cache_backend"]
    others = {name: value for name, value in data.items() if name not in names}
    return {**others, "pipeline": PipelineSettings(**settings)}


def _pair_faults(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cache = data.get("cache_backend", "none") != "none"
    offload = next((key for key in _OFFLOADS if data.get(key)), None)
    devices = getattr(data.get("parallel_config"), "world_size", 1)
    if all(data.get(key) for key in _OFFLOADS):
        yield _OFFLOADS[1], f"does not go with {_OFFLOADS[0]}; choose one of the two"
    if cache and data.get("max_num_seqs", 1) > 1:
        yield "cache_backend", _KEEPS_STATE
    if data.get("cache_config") and not cache:
        yield "cache_config", "is for a cache_backend, and none is named; name one"
    if data.get("enable_cpu_offload") and data.get("max_num_seqs", 1) > 1:
        yield "enable_cpu_offload", _MOVES_PARTS
    for key in (*_OFFLOADS, *(("cache_backend",) if cache else ())):
        if data.get(key) and devices > 1:
            yield key, f"is for one device, and a replica has {devices}; set world_size to 1"
    if data.get("lora_dir") or data.get("lora_modules"):
        if offload:
            yield offload, "does not go with adapters (lora_dir, lora_modules); take one out"
        if data.get("diffusion_compile_granularity") == "regional":
            yield "diffusion_compile_granularity", _COMPILES_ANEW
