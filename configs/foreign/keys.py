"""The keys of vLLM-Omni's files that this service does not have, and what becomes of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Place = Literal["file", "stage", "runtime", "engine_args", "parallel_config"]


@dataclass(frozen=True)
class ForeignKeys:
    """Keys of one place with the same fate.

    Attributes:
        place: Section of the reference dialect; `file` is the top of a deploy or stage_args file.
        names: The keys.
        why: What they are, after a verb or noun: the text of the refusal and of the table.
        neutral: Values that change nothing, so that they are only ignored; null always is one.
        always: Whether every value is ignored.
    """

    place: Place
    names: tuple[str, ...]
    why: str
    neutral: tuple[Any, ...] = ()
    always: bool = False

    def ignores(self, value: Any) -> bool:
        """Whether the value changes nothing here."""
        return self.always or value is None or any(_same(value, other) for other in self.neutral)

    @property
    def row(self) -> str:
        """Their row in the table of docs/configuration.md."""
        names = ", ".join(f"`{name}`" for name in self.names)
        if self.always:
            fate = "ignored"
        elif self.neutral:
            values = ", ".join(f"`{_yaml(value)}`" for value in self.neutral)
            fate = f"ignored if {values}, else refused"
        else:
            fate = "refused"
        why = self.why.removeprefix("is not supported").lstrip(":; ")
        return f"| {names} | {self.place} | {fate}{': ' if why else ''}{why} |"


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ignored(place: Place, names: str, why: str) -> ForeignKeys:
    return ForeignKeys(place, tuple(names.split()), why, always=True)


def _refused(place: Place, names: str, why: str, unless: tuple[Any, ...] = ()) -> ForeignKeys:
    return ForeignKeys(place, tuple(names.split()), why, neutral=unless)


FOREIGN: Final = (
    _ignored(
        "file",
        "pipeline",
        "names a chain of stages; model_index.json of the model describes the pipeline",
    ),
    _ignored(
        "file",
        "async_chunk connectors model_runner",
        "links stages; each stage here answers requests on its own",
    ),
    _refused(
        "file",
        "edges",
        "is not supported: each stage here answers requests on its own",
        unless=([], {}),
    ),
    _refused("file", "session_mode", "is not supported: it is for conversations", unless=("turn",)),
    _refused("file", "duplex_session", "is not supported: it is for conversations", unless=({},)),
    _refused(
        "file", "active_stream_window", "is not supported: it is for conversations", unless=(0,)
    ),
    _refused("file", "custom_voice_dir", "is not supported: it is for speech"),
    _ignored(
        "stage",
        "final_output final_output_type",
        "says what a stage returns; here that is always its outputs",
    ),
    _refused(
        "stage",
        "engine_input_source",
        "is not supported: each stage here answers requests on its own; remove it, or serve the "
        "stages as one pipeline",
        unless=([],),
    ),
    _refused(
        "stage",
        "input_connectors output_connectors",
        "is not supported: each stage here answers requests on its own",
        unless=({},),
    ),
    _refused(
        "stage", "is_comprehension", "is not supported: it marks a language model", unless=(False,)
    ),
    _refused(
        "stage",
        "custom_process_input_func custom_process_next_stage_input_func prompt_expand_func "
        "cfg_kv_collect_func",
        "is not supported: code named in a stage file never runs",
    ),
    _refused(
        "stage",
        "default_pooling_params subtalker_sampling_params",
        "is not supported: it is for language models and speech",
        unless=({},),
    ),
    _ignored("runtime", "process", "every replica is a process of its own"),
    _ignored(
        "runtime",
        "requires_multimodal_data",
        "says what a stage reads; here the pipeline's tasks say it",
    ),
    _ignored("runtime", "log_level log_stats", "use the setting LOG_LEVEL and /metrics"),
    _refused("runtime", "num_gpus", "is not supported; use parallel_config.world_size"),
    _refused("runtime", "worker_cls additional_config", "is not supported: it names code of vLLM"),
    _refused(
        "parallel_config",
        "allgather_degree vae_patch_parallel_size text_encoder_tp_size",
        "is not supported: it is another way to split a model",
        unless=(1,),
    ),
    _refused(
        "parallel_config",
        "enable_expert_parallel use_hsdp mask_sp_padding ulysses_a2a_permute",
        "is not supported: it is another way to split a model",
        unless=(False,),
    ),
    _refused("parallel_config", "ulysses_mode", "is not supported", unless=("strict",)),
    _ignored(
        "parallel_config",
        "hsdp_shard_size hsdp_replicate_size vae_parallel_mode",
        "belongs to use_hsdp or vae_patch_parallel_size, which are not supported",
    ),
    _ignored(
        "engine_args",
        "model_stage model_arch model_class_name task_type hf_config_name",
        "names the pipeline; model_index.json of the model does that here",
    ),
    _ignored(
        "engine_args",
        "engine_backend distributed_executor_backend worker_type engine_output_type "
        "async_scheduling log_level log_stats disable_log_stats",
        "chooses parts of vLLM's engine, which does not run here",
    ),
    _ignored(
        "engine_args",
        "gpu_memory_utilization max_model_len max_num_batched_tokens enable_prefix_caching "
        "enable_chunked_prefill kv_cache_memory_bytes mm_processor_cache_gb skip_mm_profiling "
        "tokenizer_mode config_format",
        "configures a language model, of which there is none here",
    ),
    _ignored(
        "engine_args",
        "enforce_eager",
        "nothing is compiled unless diffusion_compile_granularity says so",
    ),
    _ignored(
        "engine_args",
        "enable_multithread_weight_load num_weight_load_threads enable_broadcast_weight_load "
        "pin_cpu_memory",
        "tunes how weights are loaded; diffusers loads them here",
    ),
    _ignored(
        "engine_args",
        "enable_cache_dit_summary enable_diffusion_pipeline_profiler profiler_config",
        "prints measurements; /metrics and the benchmark have them",
    ),
    _ignored(
        "engine_args",
        "step_execution",
        "every request runs step by step here and can be canceled between two steps",
    ),
    _ignored(
        "engine_args",
        "request_batch_max_wait_ms",
        "waits before a batch begins; here requests join at any step",
    ),
    _ignored("engine_args", "output_type video_output_transport", "files are stored"),
    _ignored("engine_args", "trust_remote_code", "code that a model brings never runs"),
    _refused(
        "engine_args",
        "diffusion_load_format load_format",
        "is not supported",
        unless=("default", "diffusers", "auto", "safetensors"),
    ),
    _refused("engine_args", "lora_path", "is not supported; use lora_modules"),
    _refused(
        "engine_args",
        "lora_scale static_lora_scale",
        "is not supported: each request has its own scale",
        unless=(1, 1.0),
    ),
    _refused("engine_args", "lora_backend", "is not supported", unless=("peft",)),
    _refused(
        "engine_args", "cache_strategy", "is not supported; use cache_backend", unless=("none",)
    ),
    _refused("engine_args", "vae_fast_path", "is not supported", unless=("lossless", "none")),
    _refused("engine_args", "host_weight_runtime_mode", "is not supported", unless=("disabled",)),
    _refused(
        "engine_args",
        "enable_distributed_layerwise_offload enable_sleep_mode disable_autocast fa_deterministic "
        "streaming_output",
        "is not supported",
        unless=(False,),
    ),
    _ignored(
        "engine_args",
        "dlo_use_allgather dlo_resident_layers dlo_host_registration_limit_gib",
        "belongs to enable_distributed_layerwise_offload, which is not supported",
    ),
    _refused(
        "engine_args",
        "diffusers_load_kwargs diffusers_call_kwargs extras engine_extras",
        "is not supported; write each option as a key of its own",
        unless=({},),
    ),
    _refused(
        "engine_args",
        "boundary_ratio custom_pipeline_args worker_extension_cls "
        "diffusion_offload_config diffusion_attention_config diffusion_attention_backend "
        "diffusion_kv_cache_dtype diffusion_kv_cache_skip_steps diffusion_kv_cache_skip_layers "
        "diffusion_kv_mode kv_transfer_config compilation_config auxiliary_text_encoder "
        "hf_overrides moe_backend",
        "is not supported",
    ),
    _refused(
        "engine_args",
        "scheduler_cls",
        "is not supported: it orders the requests of vLLM; a noise scheduler is named in scheduler",
    ),
    _refused("engine_args", "num_gpus", "is not supported; use parallel_config.world_size"),
    _refused("engine_args", "seed kv_cache_dtype", "is not supported in a stage, nor by vLLM-Omni"),
    _refused(
        "engine_args", "max_generated_image_size", "is not supported; use the setting MAX_PIXELS"
    ),
)
BY_PLACE: Final[Mapping[Place, Mapping[str, ForeignKeys]]] = {
    place: {name: keys for keys in FOREIGN if keys.place == place for name in keys.names}
    for place in ("file", "stage", "runtime", "engine_args", "parallel_config")
}
