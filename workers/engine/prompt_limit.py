"""How much of a prompt a pipeline reads.

A token counts as cut only when no text encoder of the pipeline sees it: Flux shows 77 tokens to
CLIP and 512 to T5. Knows tokenizers and the names of pipeline arguments, and no family.
"""

import inspect
from typing import Any

from transformers import PreTrainedTokenizerBase

# Tokenizers without a limit say 1e30.
_SANE = 1_000_000


def prompt_limits(pipe: Any) -> list[tuple[Any, int]]:
    """Return the tokenizers whose text encoder is loaded, each with the tokens it keeps."""
    length = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
    sequence = length.default if length is not None and isinstance(length.default, int) else _SANE
    limits = []
    for name, component in pipe.components.items():
        encoder = name.replace("tokenizer", "text_encoder")
        if (
            isinstance(component, PreTrainedTokenizerBase)
            and pipe.components.get(encoder) is not None
        ):
            limits.append((component, min(component.model_max_length, sequence)))
    return limits


def max_prompt_tokens(pipe: Any) -> int | None:
    """Return the most tokens that a text encoder reads, special ones included; None: no limit."""
    longest = max((limit for _, limit in prompt_limits(pipe)), default=_SANE)
    return longest if longest < _SANE else None


def cut_warnings(limits: list[tuple[Any, int]], name: str, text: str | None) -> tuple[str, ...]:
    """Return a sentence naming how many tokens of `text` are cut; none where nothing is."""
    if not text or not limits:
        return ()
    cut, limit = min((_count(tokenizer, text) - limit, limit) for tokenizer, limit in limits)
    if cut <= 0:
        return ()
    return (f"{name}: the last {cut} tokens were cut, for the model reads {limit} at most",)


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, truncation=False, verbose=False).input_ids)
