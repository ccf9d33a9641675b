"""The keys of vLLM-Omni's files that this service does not have.

A key stands here or in a schema (`stage_schema.py`), never in both; what is in neither is unknown.
The table of docs/configuration.md has a row for each group. Knows no file and no dialect's form.
"""

from collections.abc import Mapping
from typing import Final

from configs.dialect_engine_fields import FOREIGN_ENGINE_ARGS
from configs.foreign_keys import ForeignKeys, Place, foreign_keys

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
