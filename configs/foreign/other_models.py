"""Files of vLLM-Omni for models that are no diffusion pipeline, seen before any key is judged."""

from collections.abc import Mapping
from typing import Any, Final

from configs.errors import FieldError

# What only a model that writes tokens reads.
_TOKENS: Final = frozenset(
    {
        "detokenize",
        "max_tokens",
        "min_tokens",
        "repetition_penalty",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
_OF_TOKENS: Final = frozenset(
    {"compilation_config", "hf_overrides", "max_model_len", "subtalker_sampling_params"}
)
# Speech and song whose files have no other sign of it.
_PIPELINES: Final = frozenset({"omnivoice", "soulxsinger_svc", "soulxsinger_svs"})
_FIX: Final = "only single diffusion pipelines are served; serve this file with vLLM-Omni"


def other_model(document: Mapping[Any, Any], where: str) -> FieldError | None:
    """Return why no key of a file matters, or None for a file of diffusion stages.

    Args:
        document: The file; its stages may be anything, with sections or flat.
        where: What they are called in the file.
    """
    stages, pipeline = document.get(where), document.get("pipeline")
    if isinstance(pipeline, str) and pipeline in _PIPELINES:
        return FieldError("pipeline", f"{pipeline!r} is a speech model; {_FIX}")
    listed = stages if isinstance(stages, list) else []
    entries = [entry for entry in listed if isinstance(entry, Mapping)]
    if len(entries) > 1 and not all(map(_model, entries)):
        return FieldError(where, f"links {len(entries)} stages of one model; {_FIX}")
    for index, entry in enumerate(entries):
        if entry.get("stage_type") in (None, "diffusion") and (sign := _sign(entry)) is not None:
            reason = f"is read by language and speech models alone; {_FIX}"
            return FieldError(f"{where}[{index}].{sign}", reason)
    return None


def _model(entry: Mapping[Any, Any]) -> bool:
    return any(
        section.get("model") is not None
        for section in (entry, entry.get("engine_args"))
        if isinstance(section, Mapping)
    )


def _sign(entry: Mapping[Any, Any]) -> str | None:
    """Path in the stage of a key that has a value and that only such models read."""
    for path, section, keys in (
        ("default_sampling_params.", entry.get("default_sampling_params"), _TOKENS),
        ("", entry, _OF_TOKENS),
        ("engine_args.", entry.get("engine_args"), _OF_TOKENS),
    ):
        if isinstance(section, Mapping):
            for key in sorted(keys & section.keys()):
                if section[key] is not None:
                    return f"{path}{key}"
    return None
