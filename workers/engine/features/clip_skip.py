"""Lets pipelines leave out last layers of a CLIP text encoder that has no `text_model`.

diffusers 0.42.1 asks for `text_encoder.text_model.final_layer_norm`; transformers 5 has the norm on
the encoder itself.
"""

import weakref
from contextlib import ExitStack
from typing import Any, Self

from workers.engine.run import Feature, Parts, Run
from workers.patches import method_signature, patched, put

_NAME = "text_model"


class ClipSkip(Feature):
    """Has such encoders stand for their own `text_model` while a prompt is encoded."""

    asked_by = "clip_skip"

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return the feature; None where no layers are skipped, or the encoders need no help."""
        encoders = [part for name, part in parts.pipe.components.items() if _needs_help(name, part)]
        return cls(encoders) if encoders and parts.abilities.clip_skip else None

    def __init__(self, encoders: list[Any]) -> None:
        """Take the encoders that have the norm themselves."""
        self._encoders = encoders

    def attach(self, run: Run) -> None:
        """Change the encoding of a run that skips layers."""
        encode, encoders = run.pipe.encode_prompt.__func__, self._encoders
        # Weakly: a pipeline that holds itself keeps the tensors of its run.
        pipe = weakref.ref(run.pipe)

        def helped(*args: Any, **options: Any) -> Any:
            # Not longer: diffusers reads from the name how adapters for the encoder are written.
            with ExitStack() as around:
                for encoder in encoders:
                    around.enter_context(patched(encoder, _NAME, encoder))
                return encode(pipe(), *args, **options)

        untyped: Any = helped
        untyped.__signature__ = method_signature(encode)
        put(run.pipe, "encode_prompt", helped)


def _needs_help(name: str, part: Any) -> bool:
    if not name.startswith("text_encoder") or hasattr(part, _NAME):
        return False
    return hasattr(part, "final_layer_norm")
