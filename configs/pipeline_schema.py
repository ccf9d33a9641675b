"""The keys of `engine_args` that make a pipeline smaller or faster, and its adapters.

It knows every key, its bounds, and which exclude each other whatever the model; not which of them
a family or a device can take.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any, Final

from marshmallow import ValidationError, fields, validates_schema

from configs.field_types import OneOf, Text, Whole
from configs.pipeline_fields import (
    CacheOptions,
    ExistingPath,
    Flag,
    LoraModules,
    QuantizationSchema,
    WarmupShapes,
)
from configs.pipeline_settings import CACHE_BACKENDS, PipelineSettings
from configs.section_schema import SectionSchema

_OFFLOADS: Final = ("enable_cpu_offload", "enable_layerwise_offload")
_MOST_BYTES: Final = 2**40
_KEEPS_STATE: Final = (
    "keeps state from step to step of one request, so that requests can not share steps; "
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
