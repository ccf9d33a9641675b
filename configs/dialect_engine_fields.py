"""The keys of vLLM-Omni's engine arguments that this service does not have.

A key stands here or in a schema (`stage_schema.py`), never in both; what is in neither is unknown.
The table of docs/configuration.md has a row for each group. Knows no file and no dialect's form.
"""

from typing import Final

from configs.foreign_keys import foreign_keys

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
