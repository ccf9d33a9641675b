"""How much of a prompt a pipeline reads.

A token counts as cut only when no text encoder of the pipeline sees it: Flux shows 77 tokens to
CLIP and 512 to T5. Knows tokenizers, the names of pipeline arguments, and which families count
what they write around the prompt.
"""

import inspect
from typing import Any

from transformers import PreTrainedTokenizerBase

# Tokenizers without a limit say 1e30.
_SANE = 1_000_000
# Encoders whose places are reckoned and not learnt have configurations with far more.
_MOST_PLACES = 1024
# Written down in the code of their pipelines, by the beginning of the class.
_OWN_LENGTHS = {"Latte": 120, "Kandinsky3": 128, "IF": 77}
# Pipelines that write the prompt into a chat and cut that; others allow for what they add.
_COUNT_THEIR_TEMPLATE = ("ZImage", "Flux2Klein")
_MARK = "prompt"


def prompt_limits(pipe: Any) -> list[tuple[Any, int]]:
    """Return the tokenizers whose text encoder is loaded, each with the tokens it keeps."""
    kind = type(pipe).__name__
    length = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
    asked = length.default if length is not None and isinstance(length.default, int) else None
    asked = next((own for start, own in _OWN_LENGTHS.items() if kind.startswith(start)), asked)
    limits = []
    for name, component in pipe.components.items():
        tokenizer = _tokenizer_of(name, component)
        encoder = pipe.components.get(name.replace("tokenizer", "text_encoder"))
        if tokenizer is not None and encoder is not None:
            most = tokenizer.model_max_length
            if asked is not None:
                # Pipelines ask the others for their own length, whatever the tokenizer says.
                most = min(most, asked) if _has_places(encoder) else asked
            limits.append((tokenizer, most - _tokens_before(pipe, tokenizer)))
    return limits


def _has_places(encoder: Any) -> bool:
    """Tell whether an encoder learnt a place for each token, as CLIP did: it takes no more."""
    places = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
    return places is not None and places <= _MOST_PLACES


def _tokenizer_of(name: str, component: Any) -> Any:
    """A part that is a tokenizer, or that which stands for one has within (FLUX.2); else None."""
    if name.startswith("tokenizer"):
        component = getattr(component, "tokenizer", component)
    return component if isinstance(component, PreTrainedTokenizerBase) else None


def _tokens_before(pipe: Any, tokenizer: Any) -> int:
    """Tokens that the pipeline puts before the prompt and counts with it."""
    if not type(pipe).__name__.startswith(_COUNT_THEIR_TEMPLATE) or not tokenizer.chat_template:
        return 0
    written = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return _count(tokenizer, written.partition(_MARK)[0])


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
