"""Weighs words of a prompt that is written `a (red:1.3) circle`, for requests that ask for it.

The encoding of a weighed token is moved along its difference to that of an empty prompt, as far as
the weight says: 1 leaves it, 0 is the empty prompt there.
"""

import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from configs.parameters import Abilities
from workers.engine.run import Feature, Parts, Run
from workers.families import family_of
from workers.patches import method_signature, put

_WEIGHED = re.compile(r"\(([^()]+):\s*(\d{1,2}(?:\.\d+)?)\s*\)")
# Arguments of `encode_prompt`, in the order in which it returns their encodings.
_TEXTS = ("prompt", "negative_prompt")


class PromptWeights(Feature):
    """Weighs prompts of families whose encoding has one row for each token of one tokenizer."""

    asked_by = "prompt_weighting"

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return the feature; None where the family's encoding is another."""
        return cls() if family_of(parts.pipe).weighs_prompt else None

    def offers(self, abilities: Abilities) -> Abilities:
        """Offer the option."""
        return replace(abilities, prompt_weighting=True)

    def attach(self, run: Run) -> None:
        """Change the encoding of a run that asks for it."""
        run.text_state += ("prompt_weighting",)
        encode = run.pipe.encode_prompt
        if hasattr(encode, "__func__"):
            # Weakly: a pipeline that holds itself keeps the tensors of its run.
            encode = _weakly(run.pipe, encode.__func__)
        signature, tokenizer = _signature(run.pipe), run.pipe.tokenizer

        def weighed(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            texts = {name: bound.arguments.get(name) for name in _TEXTS}
            read = {name: _read(text) for name, text in texts.items() if text is not None}
            bound.arguments.update(
                {name: [text for text, _ in each] for name, each in read.items()}
            )
            made = list(encode(*bound.args, **bound.kwargs))
            if not any(spans for each in read.values() for _, spans in each):
                return tuple(made)
            bound.arguments.update({name: [""] * len(each) for name, each in read.items()})
            empty = encode(*bound.args, **bound.kwargs)
            for index, name in enumerate(_TEXTS):
                if name in read and made[index] is not None:
                    weights = [_weights(tokenizer, *each) for each in read[name]]
                    made[index] = _moved(made[index], empty[index], weights)
            return tuple(made)

        untyped: Any = weighed
        untyped.__signature__ = signature
        put(run.pipe, "encode_prompt", weighed, over=True)


def _weakly(pipe: Any, encode: Any) -> Any:
    found = weakref.ref(pipe)
    return lambda *args, **options: encode(found(), *args, **options)


def _signature(pipe: Any) -> Any:
    return method_signature(type(pipe).encode_prompt)


Spans = list[tuple[int, int, float]]


def _read(text: str | Sequence[str]) -> list[tuple[str, Spans]]:
    """Return each text without its weights, and from where to where which weight counts."""
    return [read_weights(each) for each in ([text] if isinstance(text, str) else text)]


def read_weights(text: str) -> tuple[str, Spans]:
    """Return the text without weights, and the spans of its characters that have one but 1."""
    plain, spans, end = "", Spans(), 0
    for found in _WEIGHED.finditer(text):
        plain += text[end : found.start()]
        weight = float(found[2])
        if weight != 1:
            spans.append((len(plain), len(plain) + len(found[1]), weight))
        plain += found[1]
        end = found.end()
    return plain + text[end:], spans


def _weights(tokenizer: Any, text: str, spans: Spans) -> list[float]:
    """The weight of each token that the encoder reads, padding too."""
    places = tokenizer(
        text,
        padding="max_length",
        truncation=True,
        max_length=tokenizer.model_max_length,
        return_offsets_mapping=True,
    )["offset_mapping"]
    return [
        next((weight for low, high, weight in spans if low <= start and start < end <= high), 1.0)
        for start, end in places
    ]


def _moved(made: torch.Tensor, empty: torch.Tensor, weights: list[list[float]]) -> torch.Tensor:
    """Move the encodings `[outputs, tokens, channels]` of texts from those of the empty text."""
    rows = torch.tensor(weights, dtype=made.dtype, device=made.device)
    rows = rows.repeat_interleave(len(made) // len(weights), 0)[..., None]
    return torch.where(rows == 1, made, empty + (made - empty) * rows)
