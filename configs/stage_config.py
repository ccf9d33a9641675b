"""What a stage file says, as frozen values; each key with its bounds and its default.

A schema of `configs/stage_schema.py` reads a key by what stands in its annotation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, get_args

from marshmallow import fields, validate

from configs.adapter_fields import LoraModules, LoraSource
from configs.fields import Flag, Number, OneOf, Text, Whole
from configs.scheduler_fields import Scheduler, SchedulerSettings
from configs.stage_fields import (
    ByPart,
    CacheOptions,
    Devices,
    Environment,
    ExistingPath,
    Model,
    ServedNames,
    WarmupShape,
    WarmupShapes,
)

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
ParallelWay = Literal["auto", "cfg", "context", "device_map"]
Granularity = Literal["none", "regional"]
CACHE_BACKENDS = (
    "first_block_cache",
    "taylorseer_cache",
    "mag_cache",
    "faster_cache",
    "pyramid_attention_broadcast",
)
QUANTIZATION_METHODS = ("int8", "fp8", "bitsandbytes_8bit", "bitsandbytes_4bit", "gguf")


@dataclass(frozen=True)
class Quantization:
    """How weights are kept small.

    Attributes:
        method: `int8` and `fp8` through torchao, `bitsandbytes_8bit` and `bitsandbytes_4bit`
            through bitsandbytes, all while loading; `gguf` reads a file that is so already.
        components: Parts of the pipeline that are quantized; none named means the denoisers.
        gguf_file: Absolute path of the denoiser's file, for `gguf` alone.
    """

    method: Annotated[str, OneOf(*QUANTIZATION_METHODS, required=True)]
    components: Annotated[
        tuple[str, ...], fields.List(Text("transformer"), validate=validate.Length(min=1))
    ] = ()
    gguf_file: Annotated[str | None, ExistingPath("file", "./models/flux1-dev-Q4_K_S.gguf")] = None


@dataclass(frozen=True)
class PipelineSettings:
    """Each setting is one feature of diffusers or torch; docs/configuration.md says what it does.

    Attributes:
        vae_use_slicing: Decode the images of a request one by one.
        vae_use_tiling: Decode in tiles.
        enable_cpu_offload: Keep the parts on the host, one at a time on the device.
        enable_layerwise_offload: Keep the denoiser's blocks on the host, a few on the device.
        quantization: How weights are kept small; None for as they are.
        cache_backend: Which denoiser outputs are reused between steps; None for none.
        cache_config: Options of that cache, by diffusers' names.
        attention_backend: By diffusers' name; None for the model's own.
        channels_last: Memory layout of convolution weights.
        diffusion_compile_granularity: `regional` compiles the repeated blocks.
        diffusion_compile_dynamic: Whether compiled blocks take any size.
        warmup_shapes: Sizes run before the replica is ready, beside the default one.
        lora_dir: Absolute path of a folder of adapters.
        lora_modules: Adapters by the names that requests use.
        max_cpu_loras: Adapters kept loaded.
        enable_prompt_embed_cache: Whether the embeddings of a prompt are kept for the next time.
        prompt_embed_cache_bytes: Bytes of embeddings kept at most.
    """

    vae_use_slicing: Annotated[bool, Flag()] = False
    vae_use_tiling: Annotated[bool, Flag()] = False
    enable_cpu_offload: Annotated[bool, Flag()] = False
    enable_layerwise_offload: Annotated[bool, Flag()] = False
    quantization: Quantization | None = None
    cache_backend: Annotated[str | None, OneOf("none", *CACHE_BACKENDS)] = None
    cache_config: Annotated[Mapping[str, Any], CacheOptions()] = field(default_factory=dict)
    attention_backend: Annotated[str | None, Text("native")] = None
    channels_last: Annotated[bool, Flag()] = False
    diffusion_compile_granularity: Annotated[Granularity, OneOf(*get_args(Granularity))] = "none"
    diffusion_compile_dynamic: Annotated[bool, Flag()] = True
    warmup_shapes: Annotated[tuple[WarmupShape, ...], WarmupShapes()] = ()
    lora_dir: Annotated[str | None, ExistingPath("folder", "./loras")] = None
    lora_modules: Annotated[Mapping[str, LoraSource], LoraModules()] = field(default_factory=dict)
    max_cpu_loras: Annotated[int, Whole(1, 1024, "adapters")] = 8
    enable_prompt_embed_cache: Annotated[bool, Flag()] = True
    prompt_embed_cache_bytes: Annotated[int, Whole(1, 2**40, "bytes")] = 268_435_456

    @property
    def one_at_a_time(self) -> str | None:
        """The key for which a replica can run one request at a time only; None where none can."""
        if self.cache_backend is not None:
            return "cache_backend"
        return "enable_cpu_offload" if self.enable_cpu_offload else None


@dataclass(frozen=True)
class ParallelConfig:
    """How one replica spreads over devices.

    Attributes:
        world_size: Devices of one replica.
        ulysses_degree: Ranks among which the heads of each attention are split.
        ring_degree: Ranks among which keys and values of each attention go round.
        cfg_parallel_size: Denoiser copies among which the rows of each call are split; beside
            another degree, groups of ranks.
        device_map: `balanced` puts the parts of the pipeline on different devices.
        collective_timeout_s: Ranks that wait for one of them for longer take it to hang.
    """

    world_size: Annotated[int, Whole(1, 1024, "devices of one replica")] = 1
    ulysses_degree: Annotated[int, Whole(1, 1024, "ranks")] = 1
    ring_degree: Annotated[int, Whole(1, 1024, "ranks")] = 1
    cfg_parallel_size: Annotated[int, Whole(1, 1024, "denoiser copies")] = 1
    device_map: Annotated[Literal["balanced"] | None, OneOf("balanced")] = None
    collective_timeout_s: Annotated[float, Number(1, 86_400, "seconds")] = 240.0

    @property
    def context_degree(self) -> int:
        """Ranks that share each denoiser call by cutting its sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def way(self) -> ParallelWay:
        """How several devices are used; `auto` leaves it to what the model can do."""
        if self.device_map is not None:
            return "device_map"
        if self.context_degree > 1:
            return "context"
        return "cfg" if self.cfg_parallel_size > 1 else "auto"


@dataclass(frozen=True)
class EngineArgs:
    """What the engine of each replica loads and how.

    Attributes:
        model: Absolute path of a diffusers folder, or a hub id `org/name`.
        served_model_name: Name clients use, or several; None for the model's own.
        dtype: Type of the weights, of all parts or by their names; `default` is that of parts that
            are not named, and `auto` leaves it to the engine.
        device: Kind of device; `auto` is CUDA where the machine has it, else CPU.
        revision: Branch, tag or commit of a hub model.
        variant: Weight variant such as `fp16`.
        max_num_seqs: Requests that may share a denoising step of one replica.
        scheduler: What is changed of the model's noise scheduler; None for nothing.
        parallel_config: Devices of one replica.
        pipeline: Memory, speed, adapters and warm-up.
    """

    model: Annotated[str, Model("Qwen/Qwen-Image", required=True)]
    served_model_name: Annotated[str | tuple[str, ...] | None, ServedNames("my-model")] = None
    dtype: Annotated[Dtype | Mapping[str, Dtype], ByPart(*get_args(Dtype))] = "auto"
    device: Annotated[Device, OneOf(*get_args(Device))] = "auto"
    revision: Annotated[str | None, Text("main")] = None
    variant: Annotated[str | None, Text("fp16")] = None
    max_num_seqs: Annotated[int, Whole(1, 1024, "requests that may share a step")] = 1
    scheduler: Annotated[SchedulerSettings | None, Scheduler()] = None
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)

    @property
    def model_path(self) -> Path | None:
        """The model's folder, or None when the model is a hub id."""
        return Path(self.model) if PurePath(self.model).is_absolute() else None


@dataclass(frozen=True)
class RuntimeConfig:
    """Where the replicas of a stage run.

    Attributes:
        devices: All devices of the stage, in the order in which replicas get them.
        num_replicas: Worker processes of the stage.
        env: Environment variables set for each of them before torch is imported.
    """

    devices: Annotated[tuple[int, ...], Devices()]
    num_replicas: Annotated[int, Whole(1, 1024, "replicas")] = 1
    env: Annotated[Mapping[str, str], Environment()] = field(default_factory=dict)


@dataclass(frozen=True)
class StageConfig:
    """One entry of `stages`: one model, served by one or more replicas.

    Attributes:
        stage_id: Number of the stage, unique in its file.
        runtime: Where its replicas run.
        engine_args: What they load.
        stage_type: Always `diffusion`; other kinds are refused when the file is read.
        default_sampling_params: Parameters for requests that leave them out.
        paths: Where it stands in the file, and where its `runtime.devices` and
            `engine_args.device` do, for messages about them.
    """

    stage_id: int
    runtime: RuntimeConfig
    engine_args: EngineArgs
    stage_type: Literal["diffusion"] = "diffusion"
    default_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def model_name(self) -> str:
        """Name of this stage's model, as it is shown."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names by which clients ask for this stage's model; the first is the one shown."""
        names = self.engine_args.served_model_name
        if names is None:
            path = self.engine_args.model_path
            names = path.name if path is not None else self.engine_args.model
        return (names,) if isinstance(names, str) else names

    @property
    def devices_per_replica(self) -> int:
        """Devices that each replica of this stage takes."""
        return self.engine_args.parallel_config.world_size

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The stage's devices, cut into contiguous chunks, one for each replica."""
        size = self.devices_per_replica
        return tuple(
            self.runtime.devices[first : first + size]
            for first in range(0, self.runtime.num_replicas * size, size)
        )


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica to be started.

    Attributes:
        name: `replica3`; also the name of its queue.
        index: 3: its number over all stages and hosts.
        stage: The stage it serves.
        devices: Its chunk of the stage's devices.
    """

    name: str
    index: int
    stage: StageConfig
    devices: tuple[int, ...]
