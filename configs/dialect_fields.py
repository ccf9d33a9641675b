"""The keys of vLLM-Omni's files that this service does not have, and what becomes of each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from configs.errors import FieldError
from configs.fields import with_value

Dialect = Literal["reference", "stage_args", "deploy"]


_NO_MODEL: Final = (
    "is missing; files of this kind leave it to the command line "
    "(python -m scripts.serve MODEL --stage-configs-path FILE); give it there, or write it here"
)


_ELSEWHERE: Final = re.compile(r", which belongs under (?:runtime|engine_args(?:\.\w+)?)")


_HOME: Final = re.compile(r"under (?:runtime|engine_args)(?![.\w])")


@dataclass
class Translation:
    """A stage file in the reference dialect, and how it differs from what was written.

    Attributes:
        dialect: Which one it was.
        document: In the reference dialect; not yet checked.
        faults: Keys that are refused because the service does not have them.
        ignored: Paths, as written, of keys that change nothing here.
        names: Paths of the document, to where the same stands in the file.
    """

    dialect: Dialect
    document: dict[Any, Any]
    faults: list[FieldError] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def written(self, path: str) -> str:
        """Return where in the file the thing stands that has this path in the document."""
        for prefix in sorted(self.names, key=len, reverse=True):
            rest = path.removeprefix(prefix)
            if path.startswith(prefix) and (not rest or rest[0] in ".["):
                return self.names[prefix] + rest
        return self._flat(path) if self.dialect == "deploy" else path

    def reworded(self, fault: FieldError) -> FieldError:
        """Return the fault with its paths as they stand in the file."""
        message = fault.message
        no_model = fault.code == "missing" and fault.param.endswith(".engine_args.model")
        if no_model and self.dialect != "reference":
            message = _NO_MODEL
        if self.dialect == "stage_args":
            message = message.replace("stages[", "stage_args[")
        elif self.dialect == "deploy":
            message = self._flat(_HOME.sub("in the stage itself", _ELSEWHERE.sub("", message)))
        return FieldError(self.written(fault.param), message, fault.code)

    @staticmethod
    def _flat(text: str) -> str:
        return text.replace("engine_args.", "").replace("runtime.", "")

    def ignore(self, path: str) -> None:
        """Note a key that changes nothing; `path` is that of the document."""
        written = self.written(path)
        if written not in self.ignored:
            self.ignored.append(written)

    def refuse(self, path: str, value: Any, reason: str) -> None:
        """Note a key that is refused; `path` is that of the document."""
        self.faults.append(FieldError(self.written(path), with_value(reason, value)))


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
        return f"| {names} | {self.place} | {fate}: {self.why} |"


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def foreign_keys(
    place: Place, names: str, why: str, neutral: tuple[Any, ...] = (), *, always: bool = False
) -> ForeignKeys:
    """Return them, their names separated by blanks."""
    return ForeignKeys(place, tuple(names.split()), why, neutral, always)


FOREIGN_ENGINE_ARGS: Final = (
    foreign_keys(
        "engine_args",
        "model_stage model_arch model_class_name task_type hf_config_name",
        "says which pipeline it is; model_index.json of the model says it",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "engine_backend distributed_executor_backend worker_type engine_output_type "
        "async_scheduling log_level log_stats disable_log_stats",
        "chooses parts of vLLM's engine; this one is our own",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "gpu_memory_utilization max_model_len max_num_batched_tokens "
        "enable_prefix_caching enable_chunked_prefill kv_cache_memory_bytes "
        "mm_processor_cache_gb skip_mm_profiling tokenizer_mode config_format",
        "sizes or reads a language model, of which there is none",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "enforce_eager",
        "is how it is unless diffusion_compile_granularity says otherwise",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "enable_multithread_weight_load num_weight_load_threads "
        "enable_broadcast_weight_load pin_cpu_memory",
        "is about how fast weights are loaded; diffusers loads them",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "enable_cache_dit_summary enable_diffusion_pipeline_profiler profiler_config",
        "prints measurements; /metrics and the benchmark have them",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "step_execution",
        "is how every request runs here: step by step, so that it can be canceled between two",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "request_batch_max_wait_ms",
        "waits before a batch begins; here requests join at any step",
        always=True,
    ),
    foreign_keys(
        "engine_args", "output_type video_output_transport", "files are stored", always=True
    ),
    foreign_keys(
        "engine_args",
        "trust_remote_code",
        "lets a model bring code; it is never run here",
        neutral=(False,),
    ),
    foreign_keys(
        "engine_args",
        "diffusion_load_format load_format",
        "is not served",
        neutral=("default", "diffusers", "auto", "safetensors"),
    ),
    foreign_keys("engine_args", "lora_path", "is lora_modules here; name each adapter there"),
    foreign_keys(
        "engine_args", "lora_scale static_lora_scale", "is of each request", neutral=(1, 1.0)
    ),
    foreign_keys("engine_args", "lora_backend", "is not served", neutral=("peft",)),
    foreign_keys("engine_args", "cache_strategy", "is cache_backend here", neutral=("none",)),
    foreign_keys("engine_args", "vae_fast_path", "is not served", neutral=("lossless", "none")),
    foreign_keys("engine_args", "host_weight_runtime_mode", "is not served", neutral=("disabled",)),
    foreign_keys(
        "engine_args",
        "enable_distributed_layerwise_offload enable_sleep_mode disable_autocast "
        "fa_deterministic streaming_output",
        "is not served",
        neutral=(False,),
    ),
    foreign_keys(
        "engine_args",
        "dlo_use_allgather dlo_resident_layers dlo_host_registration_limit_gib",
        "belongs to enable_distributed_layerwise_offload, which is not served",
        always=True,
    ),
    foreign_keys(
        "engine_args",
        "diffusers_load_kwargs diffusers_call_kwargs extras engine_extras",
        "hands keys through unread; write those that are served as keys of their own",
        neutral=({},),
    ),
    foreign_keys(
        "engine_args",
        "boundary_ratio flow_shift custom_pipeline_args worker_extension_cls "
        "scheduler_cls diffusion_offload_config diffusion_attention_config "
        "diffusion_attention_backend diffusion_kv_cache_dtype "
        "diffusion_kv_cache_skip_steps diffusion_kv_cache_skip_layers diffusion_kv_mode "
        "kv_transfer_config compilation_config auxiliary_text_encoder hf_overrides "
        "moe_backend",
        "is not served",
    ),
    foreign_keys("engine_args", "num_gpus", "is parallel_config.world_size here; write that"),
    foreign_keys(
        "engine_args", "seed kv_cache_dtype", "is refused by vLLM-Omni too in such a stage"
    ),
    foreign_keys("engine_args", "max_generated_image_size", "is the setting MAX_PIXELS here"),
)


FOREIGN: Final = (
    foreign_keys(
        "file",
        "pipeline",
        "names a topology of stages; model_index.json of the model says it",
        always=True,
    ),
    foreign_keys(
        "file",
        "async_chunk connectors model_runner",
        "is about how stages feed each other; each stage here answers requests on its own",
        always=True,
    ),
    foreign_keys(
        "file",
        "edges",
        "feeds stages from each other; each stage here answers requests on its own",
        neutral=([], {}),
    ),
    foreign_keys("file", "base_config", "is another file, which is not followed; write one file"),
    foreign_keys("file", "session_mode", "is for conversations", neutral=("turn",)),
    foreign_keys("file", "duplex_session", "is for conversations", neutral=({},)),
    foreign_keys("file", "active_stream_window", "is for conversations", neutral=(0,)),
    foreign_keys("file", "custom_voice_dir", "is for speech"),
    foreign_keys(
        "stage",
        "final_output final_output_type",
        "says what a stage hands out, which here is its outputs",
        always=True,
    ),
    foreign_keys(
        "stage",
        "engine_input_source",
        "feeds this stage from other stages, and each stage here answers requests on its "
        "own; leave the key out, or serve the stages as one pipeline",
        neutral=([],),
    ),
    foreign_keys(
        "stage",
        "input_connectors output_connectors",
        "feeds this stage from others, or others from it; each stage here answers "
        "requests on its own",
        neutral=({},),
    ),
    foreign_keys("stage", "is_comprehension", "marks a language model", neutral=(False,)),
    foreign_keys(
        "stage",
        "custom_process_input_func custom_process_next_stage_input_func "
        "prompt_expand_func cfg_kv_collect_func",
        "names code to be run; none is taken from a stage file",
    ),
    foreign_keys(
        "stage",
        "default_pooling_params subtalker_sampling_params",
        "is for language models and speech",
        neutral=({},),
    ),
    foreign_keys("runtime", "process", "every replica is a process of its own", always=True),
    foreign_keys(
        "runtime",
        "requires_multimodal_data",
        "says what a stage reads; requests with images are taken where the pipeline takes them",
        always=True,
    ),
    foreign_keys("runtime", "log_level log_stats", "is LOG_LEVEL and /metrics here", always=True),
    foreign_keys("runtime", "num_gpus", "is parallel_config.world_size here; write that"),
    foreign_keys(
        "runtime", "worker_cls additional_config", "names code of vLLM; replicas are ours"
    ),
    foreign_keys(
        "parallel_config",
        "allgather_degree vae_patch_parallel_size text_encoder_tp_size",
        "is a way to split a model that is not served here",
        neutral=(1,),
    ),
    foreign_keys(
        "parallel_config",
        "enable_expert_parallel use_hsdp mask_sp_padding ulysses_a2a_permute",
        "is a way to split a model that is not served here",
        neutral=(False,),
    ),
    foreign_keys("parallel_config", "ulysses_mode", "is not served", neutral=("strict",)),
    foreign_keys(
        "parallel_config",
        "hsdp_shard_size hsdp_replicate_size vae_parallel_mode",
        "belongs to use_hsdp or vae_patch_parallel_size, which are not served",
        always=True,
    ),
    *FOREIGN_ENGINE_ARGS,
)


BY_PLACE: Final[Mapping[Place, Mapping[str, ForeignKeys]]] = {
    place: {name: keys for keys in FOREIGN if keys.place == place for name in keys.names}
    for place in ("file", "stage", "runtime", "engine_args", "parallel_config")
}
