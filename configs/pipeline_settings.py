"""What a stage says of its pipeline beside model and devices: memory, speed, adapters, warm-up.

Frozen values, already checked for form. Whether a family or a device can take a setting is known
only to the worker that loads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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

    method: str
    components: tuple[str, ...] = ()
    gguf_file: str | None = None


@dataclass(frozen=True)
class WarmupShape:
    """One size that is run before a replica becomes ready: pixels, and frames for a video."""

    width: int
    height: int
    num_frames: int | None = None


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

    vae_use_slicing: bool = False
    vae_use_tiling: bool = False
    enable_cpu_offload: bool = False
    enable_layerwise_offload: bool = False
    quantization: Quantization | None = None
    cache_backend: str | None = None
    cache_config: Mapping[str, Any] = field(default_factory=dict)
    attention_backend: str | None = None
    channels_last: bool = False
    diffusion_compile_granularity: Literal["none", "regional"] = "none"
    diffusion_compile_dynamic: bool = True
    warmup_shapes: tuple[WarmupShape, ...] = ()
    lora_dir: str | None = None
    lora_modules: Mapping[str, LoraSource] = field(default_factory=dict)
    max_cpu_loras: int = 8
    enable_prompt_embed_cache: bool = True
    prompt_embed_cache_bytes: int = 268_435_456

    @property
    def one_at_a_time(self) -> str | None:
        """The key for which a replica can run one request at a time only; None where none can."""
        if self.cache_backend is not None:
            return "cache_backend"
        return "enable_cpu_offload" if self.enable_cpu_offload else None
