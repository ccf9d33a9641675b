"""Generation parameters: everything a client may ask of a pipeline, as one frozen value.

Knows the names and how they travel as JSON. Does not know their limits (the door checks those
against a model's abilities) and nothing of Redis, HTTP or torch, so that the engine may use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

TEXT_TO_IMAGE = "text-to-image"
OUTPUT_FORMATS = ("png", "jpeg", "webp")
MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """One request's generation parameters, complete: the defaults are already filled in.

    Attributes:
        prompt: What the output should show.
        task: The pipeline's task, such as ``text-to-image``.
        negative_prompt: What it should not show; None where the client gave none.
        width: Pixels.
        height: Pixels.
        num_inference_steps: Denoising steps asked for; a task may run fewer (image-to-image does).
        guidance_scale: Classifier-free guidance weight (Ho & Salimans 2022); None leaves it to the
            pipeline.
        true_cfg_scale: The same for guidance-distilled families that also take a true one.
        num_outputs_per_prompt: Outputs of this request; output k has seed ``seed + k``.
        seed: Seed of output 0; always set, drawn at submit when the client gave none.
        scheduler: Noise scheduler class by name; None means the one saved with the model.
        output_format: ``png``, ``jpeg`` or ``webp``.
        output_compression: Quality of jpeg and webp, 0 to 100; None means the format's usual one.
        deterministic: Run alone, so that the bytes are equal on any replica.
    """

    prompt: str
    seed: int
    width: int
    height: int
    num_inference_steps: int
    task: str = TEXT_TO_IMAGE
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_outputs_per_prompt: int = 1
    scheduler: str | None = None
    output_format: str = "png"
    output_compression: int | None = None
    deterministic: bool = False

    def seeds(self) -> tuple[int, ...]:
        """Return one seed per output: ``seed``, ``seed + 1``, and so on."""
        return tuple(self.seed + k for k in range(self.num_outputs_per_prompt))

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with ``changes`` laid over it; raises TypeError for an unknown name."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping of all parameters, None included."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote; names a newer version added are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a loaded model can do, published by its replicas so that the door can check requests.

    Attributes:
        tasks: Pipeline tasks it serves.
        size_multiple: Width and height must be multiples of it, in pixels.
        default_width: Pixels, used when the request names no size.
        default_height: Pixels.
        default_steps: Denoising steps when the request names none.
        default_guidance_scale: None where the pipeline's own default stands.
        negative_prompt: Whether the pipeline takes one.
        true_cfg_scale: Whether the pipeline takes one.
        guidance_scale: Whether the pipeline takes one.
        schedulers: Noise schedulers a request may name, the model's own first.
        max_pixels: Largest width x height one output may have.
        max_prompt_tokens: Tokens the tokenizer keeps; None where there is no such limit.
    """

    tasks: tuple[str, ...]
    size_multiple: int
    default_width: int
    default_height: int
    default_steps: int
    default_guidance_scale: float | None = None
    negative_prompt: bool = True
    guidance_scale: bool = True
    true_cfg_scale: bool = False
    schedulers: tuple[str, ...] = ()
    max_pixels: int = 4_194_304
    max_prompt_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote; names a newer version added are left out."""
        known = {field.name for field in fields(cls)}
        kept = {key: value for key, value in data.items() if key in known}
        return cls(
            **{
                **kept,
                "tasks": tuple(kept["tasks"]),
                "schedulers": tuple(kept.get("schedulers", ())),
            }
        )
