"""The schemas of a stage file, and what in one does not go together."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any, ClassVar, Final

from marshmallow import ValidationError, fields, post_load, pre_load, validate, validates_schema

from configs.adapter_fields import ChosenLoras
from configs.fields import Number, OneOf, Parameter, SectionSchema, Text, Whole, counted, readers
from configs.parameters import PARAMETERS
from configs.scheduler_fields import SHIFTS, SchedulerSettings
from configs.stage_config import (
    EngineArgs,
    ParallelConfig,
    PipelineSettings,
    Quantization,
    RuntimeConfig,
    StageConfig,
)

DEGREES: Final = ("ulysses_degree", "ring_degree", "cfg_parallel_size")


def parallel_faults(data: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Keys of a `parallel_config` that do not go together, with the reasons."""
    degrees = {name: data[name] for name in DEGREES if data.get(name, 1) > 1}
    product = math.prod(degrees.values())
    world_size = data.get("world_size", product)
    if degrees and world_size != product:
        reason = (
            f"is not ulysses_degree x ring_degree x cfg_parallel_size, which is {product}; "
            "make them agree, or leave world_size out"
        )
        yield "world_size", [reason]
    if "device_map" in data and degrees:
        names = " and ".join(degrees)
        yield (
            "device_map",
            [f"spreads parts over devices, while {names} split each call; leave one out"],
        )
    elif "device_map" in data and world_size < 2:
        yield "device_map", ["needs several devices; set world_size, or leave it out"]


_OFFLOADS: Final = ("enable_cpu_offload", "enable_layerwise_offload")
_KEEPS_STATE: Final = (
    "keeps state between the steps of one request, so requests cannot share steps; "
    "set max_num_seqs to 1"
)
_MOVES_PARTS: Final = (
    "moves whole parts of the pipeline, which requests that share steps use at the same time; "
    "set max_num_seqs to 1, or use enable_layerwise_offload"
)
_COMPILES_ANEW: Final = (
    "cannot be combined with adapters (lora_dir, lora_modules), each of which would compile "
    "again; remove one of the two"
)


def _pair_faults(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cache = data.get("cache_backend", "none") != "none"
    offload = next((key for key in _OFFLOADS if data.get(key)), None)
    devices = getattr(data.get("parallel_config"), "world_size", 1)
    if all(data.get(key) for key in _OFFLOADS):
        yield _OFFLOADS[1], f"cannot be combined with {_OFFLOADS[0]}; remove one of the two"
    if cache and data.get("max_num_seqs", 1) > 1:
        yield "cache_backend", _KEEPS_STATE
    if data.get("cache_config") and not cache:
        yield "cache_config", "needs cache_backend; set it, or remove cache_config"
    if data.get("enable_cpu_offload") and data.get("max_num_seqs", 1) > 1:
        yield "enable_cpu_offload", _MOVES_PARTS
    for key in (*_OFFLOADS, *(("cache_backend",) if cache else ())):
        if data.get(key) and devices > 1:
            yield key, f"supports one device, and a replica has {devices}; set world_size to 1"
    if data.get("lora_dir") or data.get("lora_modules"):
        if offload:
            yield (
                offload,
                "cannot be combined with adapters (lora_dir, lora_modules); remove one of the two",
            )
        if data.get("diffusion_compile_granularity") == "regional":
            yield "diffusion_compile_granularity", _COMPILES_ANEW


def kind_fault(stage: Mapping[Any, Any]) -> str | None:
    """What is wrong with the kind of a stage, or None when it is a diffusion stage."""
    kind = stage.get("stage_type")
    if kind == "diffusion":
        return None
    if kind is None:
        return "is missing; write stage_type: diffusion, the only kind that is supported"
    runtime = stage.get("runtime")
    replicas = runtime.get("num_replicas") if isinstance(runtime, Mapping) else None
    fix = "remove the stage, or serve the file with vLLM-Omni"
    if replicas is not None and replicas != 1:  # it may be anything, a list too
        return (
            f"is not supported and has runtime.num_replicas {replicas!r}: only diffusion stages "
            f"can have replicas; {fix}"
        )
    return f"is not supported: only diffusion stages are; {fix}"


def count_fault(devices: tuple[int, ...], replicas: int, each: int) -> str:
    """What is wrong with so many devices for replicas that have `each` of them."""
    found, needed = len(devices), replicas * each
    reason = (
        f"names {counted(found, 'device')}, and exactly {needed} are needed: "
        f"{counted(replicas, 'replica')} (runtime.num_replicas) x {counted(each, 'device')} each "
        f"(engine_args.parallel_config.world_size); name {needed}"
    )
    if found % each == 0:
        return f"{reason}, or set num_replicas to {found // each}"
    return reason


def twin_faults(stages: Sequence[StageConfig]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each stage that has the id or the model name of an earlier one, with the reasons."""
    for index, stage in enumerate(stages):
        faults: dict[str, Any] = {}
        for earlier, other in enumerate(stages[:index]):
            if stage.stage_id == other.stage_id:
                faults["stage_id"] = [
                    f"is already the stage_id of stages[{earlier}]; use another number"
                ]
            twice = [name for name in stage.model_names if name in other.model_names]
            if twice:
                reason = (
                    f"gives this model the name {twice[0]!r}, which stages[{earlier}] has; "
                    "set another served_model_name"
                )
                named = stage.engine_args.served_model_name is not None
                faults["engine_args"] = {"served_model_name" if named else "model": [reason]}
        if faults:
            yield index, faults


_UNSERVED: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _unserved_degree(instead: str) -> fields.Integer:
    """A degree that can only be 1 here."""
    reason = f"is not supported; leave it out: {instead}"
    return fields.Integer(
        strict=True, error_messages={"invalid": reason}, validate=validate.Equal(1, error=reason)
    )


class ParallelConfigSchema(SectionSchema):
    """`engine_args.parallel_config`."""

    class Meta(SectionSchema.Meta):
        include = readers(ParallelConfig)

    section = "under engine_args.parallel_config"

    tensor_parallel_size = _unserved_degree("ulysses_degree splits each call over devices")
    pipeline_parallel_size = _unserved_degree("device_map: balanced puts parts on several devices")
    data_parallel_size = _unserved_degree("runtime.num_replicas serves more requests at a time")

    @validates_schema
    def _refuse_what_does_not_add_up(self, data: Mapping[str, Any], **_: Any) -> None:
        faults = dict(parallel_faults(data))
        if faults:
            raise ValidationError(faults)

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> ParallelConfig:
        served = {name: data[name] for name in data if name not in _UNSERVED}
        degrees = [data.get(name, 1) for name in DEGREES]
        return ParallelConfig(**{"world_size": math.prod(degrees), **served})


class QuantizationSchema(SectionSchema):
    """`engine_args.quantization`: a word, or a mapping with `method`."""

    class Meta(SectionSchema.Meta):
        include = readers(Quantization)

    section = "under engine_args.quantization"

    @pre_load
    def _take_a_word(self, data: Any, **_: Any) -> Any:
        return {"method": data} if isinstance(data, str) else data

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> Quantization:
        file = data.get("gguf_file")
        if (data["method"] == "gguf") != (file is not None):
            reason = "is required with method gguf and refused with others"
            raise ValidationError({"gguf_file": [reason]})
        return Quantization(**{**data, "components": tuple(data.get("components", ()))})


def _with_shift(settings: SchedulerSettings | None, shift: float) -> SchedulerSettings:
    """The settings with vLLM-Omni's `flow_shift`, which says the same beside them."""
    settings = settings or SchedulerSettings()
    if settings.options.keys() & set(SHIFTS):
        reason = "stands under scheduler too; keep one of the two"
        raise ValidationError({"flow_shift": [reason]})
    return replace(settings, options={**settings.options, "flow_shift": shift})


class EngineArgsSchema(SectionSchema):
    """`engine_args`."""

    class Meta(SectionSchema.Meta):
        include = readers(EngineArgs, PipelineSettings)

    section = "under engine_args"

    parallel_config = fields.Nested(ParallelConfigSchema)
    quantization = fields.Nested(QuantizationSchema)
    flow_shift = Number(0.01, 100, "shift of the noise")

    @validates_schema
    def _refuse_pairs(self, data: Mapping[str, Any], **_: Any) -> None:
        faults = dict(_pair_faults(data))
        if faults:
            raise ValidationError({key: [fault] for key, fault in faults.items()})

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> EngineArgs:
        names = {field.name for field in dataclass_fields(PipelineSettings)}
        settings = {name: value for name, value in data.items() if name in names}
        if settings.get("cache_backend") == "none":
            del settings["cache_backend"]
        others = {name: value for name, value in data.items() if name not in names}
        if "flow_shift" in others:
            others["scheduler"] = _with_shift(others.get("scheduler"), others.pop("flow_shift"))
        return EngineArgs(**others, pipeline=PipelineSettings(**settings))


class RuntimeSchema(SectionSchema):
    """`runtime`; its dataclass is made by the stage, which knows how many devices are needed."""

    class Meta(SectionSchema.Meta):
        include = readers(RuntimeConfig)

    section = "under runtime"


def sampling_field(parameter: Parameter) -> fields.Field[Any]:
    """Return the reader of a parameter's default in a stage file."""
    low, high = parameter.stage_bounds or (parameter.low, parameter.high)
    if parameter.type is int and low is not None and high is not None:
        return Whole(int(low), int(high), parameter.unit)
    if parameter.type is float:
        return Number(low, high, parameter.unit)
    if parameter.type is tuple:
        return ChosenLoras()
    if parameter.words:
        return OneOf(*parameter.words)
    if parameter.limit:  # free text, which may be empty
        example = parameter.example
        reason = f'is not text; put it in quotes, such as "{example}"'
        return fields.String(error_messages={"invalid": reason})
    return Text(parameter.example)


class SamplingParamsSchema(SectionSchema):
    """`default_sampling_params`; the limits of the service and of the model may be narrower."""

    section = "under default_sampling_params"

    class Meta(SectionSchema.Meta):
        include: ClassVar[dict[str, fields.Field[Any]]] = {
            name: sampling_field(parameter)
            for name, parameter in PARAMETERS.items()
            if parameter.stage_default
        }


class StageSchema(SectionSchema):
    """One entry of `stages`."""

    section = "in an entry of stages"

    stage_id = Whole(
        0,
        1_000_000,
        "number of the stage",
        required=True,
        missing="is missing; write stage_id: 0 for the first stage, 1 for the next",
    )
    stage_type = OneOf("diffusion", required=True)
    runtime = fields.Nested(RuntimeSchema)
    engine_args = fields.Nested(
        EngineArgsSchema,
        required=True,
        error_messages={"required": "is missing; write it with `model:` beneath it"},
    )
    default_sampling_params = fields.Nested(SamplingParamsSchema)

    @pre_load
    def _refuse_other_kinds(self, data: Any, **_: Any) -> Any:
        """Refuse first of all: the keys of another kind of stage would all be unknown."""
        if isinstance(data, Mapping):
            reason = kind_fault(data)
            if reason:
                raise ValidationError({"stage_type": [reason]})
        return data

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> StageConfig:
        runtime = data.get("runtime", {})
        replicas = runtime.get("num_replicas", 1)
        each = data["engine_args"].parallel_config.world_size
        devices = runtime.get("devices", tuple(range(replicas * each)))
        if len(devices) != replicas * each:
            raise ValidationError({"runtime": {"devices": [count_fault(devices, replicas, each)]}})
        return StageConfig(**{**data, "runtime": RuntimeConfig(**{**runtime, "devices": devices})})


class StageFileSchema(SectionSchema):
    """The whole file, to a tuple of StageConfig."""

    section = "at the top of the file"

    stages = fields.List(
        fields.Nested(StageSchema),
        required=True,
        validate=validate.Length(
            min=1,
            error="is empty; write an entry for each model, such as `- stage_id: 0`",
        ),
        error_messages={
            "required": "is missing; write `stages:` with one entry for each model",
            "invalid": "is not a list; write an entry for each model, such as `- stage_id: 0`",
        },
    )

    @validates_schema
    def _refuse_twins(self, data: Mapping[str, Any], **_: Any) -> None:
        faults = dict(twin_faults(data["stages"]))
        if faults:
            raise ValidationError({"stages": faults})

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> tuple[StageConfig, ...]:
        return tuple(data["stages"])
