"""What a client may ask of a pipeline, and what a model supports of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Self

TEXT_TO_IMAGE: Final = "text-to-image"
IMAGE_TO_IMAGE: Final = "image-to-image"
INPAINT: Final = "inpaint"
TEXT_TO_VIDEO: Final = "text-to-video"
IMAGE_TO_VIDEO: Final = "image-to-video"
TASKS: Final = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT, TEXT_TO_VIDEO, IMAGE_TO_VIDEO)
IMAGE_TASKS: Final = frozenset({TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT})
VIDEO_TASKS: Final = frozenset({TEXT_TO_VIDEO, IMAGE_TO_VIDEO})
FROM_IMAGE_TASKS: Final = frozenset({IMAGE_TO_IMAGE, INPAINT, IMAGE_TO_VIDEO})
IMAGE_FORMATS: Final = ("png", "jpeg", "webp")
VIDEO_FORMATS: Final = ("mp4",)
OUTPUT_FORMATS: Final = (*IMAGE_FORMATS, *VIDEO_FORMATS)
MEDIA_TYPES: Final = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "mp4": "video/mp4",
}
_MOST_WORK: Final = 10**12  # a million waiting ones still add up within 64 bits


# Schedulers of the second order call the denoiser twice for each step but the last.
_SECOND_ORDER: Final = frozenset(
    {
        "HeunDiscreteScheduler",
        "FlowMatchHeunDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
    }
)


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter of a request.

    Attributes:
        name: As the model's abilities list it.
        scale: Weight of the adapter; 1 is as it was trained.
    """

    name: str
    scale: float = 1.0


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
        output_format: ``png``, ``jpeg`` or ``webp``; ``mp4`` for videos.
        output_compression: Quality of jpeg and webp, 0 to 100; None means the format's usual one.
        deterministic: Run alone, so that the bytes are equal on any replica.
        image: Input images, by their names in the output store.
        mask_image: What to paint anew, white, by its name in the output store.
        strength: How much of the first input image is made anew, 0 to 1; None leaves it to the
            pipeline.
        num_frames: Frames of a video.
        fps: Frames in a second of a video.
        lora: Adapters, in the order they were given.
        preview: Whether small pictures are shown while it runs.
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
    image: tuple[str, ...] = ()
    mask_image: str | None = None
    strength: float | None = None
    num_frames: int | None = None
    fps: float | None = None
    lora: tuple[Lora, ...] = ()
    preview: bool = False

    @property
    def makes_video(self) -> bool:
        """Whether its outputs are videos."""
        return self.task in VIDEO_TASKS

    @property
    def kind(self) -> str:
        """The kind of its outputs: ``image`` or ``video``."""
        return "video" if self.makes_video else "image"

    def seeds(self) -> tuple[int, ...]:
        """Return one seed per output: ``seed``, ``seed + 1``, and so on."""
        return tuple(self.seed + k for k in range(self.num_outputs_per_prompt))

    def work(self) -> int:
        """Return steps x pixels x frames x outputs, what routing weighs; 10^12 at most.

        Only the share ``strength`` of the steps is run where there is an input image. Steps are
        counted in calls of the denoiser.
        """
        share = self.strength if self.image and self.strength is not None else 1.0
        steps = max(1, round(self.num_inference_steps * share))
        if self.scheduler in _SECOND_ORDER:
            steps = 2 * steps - 1
        each = self.width * self.height * (self.num_frames or 1)
        return min(steps * each * self.num_outputs_per_prompt, _MOST_WORK)

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with ``changes`` laid over it; raises TypeError for an unknown name."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping of all parameters, None included."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote; names a newer version added are left out."""
        kept = _known(cls, data)
        kept["image"] = tuple(kept.get("image", ()))
        kept["lora"] = tuple(Lora(**each) for each in kept.get("lora", ()))
        return cls(**kept)


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
        default_true_cfg_scale: None where the pipeline takes none.
        default_negative_prompt: None where requests that name none get none.
        guidance_scale: Whether the pipeline takes one.
        schedulers: Noise schedulers a request may name, the model's own first.
        full_run_schedulers: Those of them that begin at the first step only; tasks that take a
            strength refuse them.
        max_pixels: Largest width x height one output may have.
        max_prompt_tokens: Tokens the tokenizer keeps; None where there is no such limit.
        max_images: Input images one request may have; 0 where no task takes any.
        strength: Whether image-to-image takes one; editing models do not.
        default_strength: None where the pipeline's own default stands.
        default_frames: Frames of a video when the request names none; None for images.
        frames_step: A video has one frame and a multiple of this many more.
        max_frames: Most frames of one video.
        default_fps: Frames in a second when the request names none; None for images.
        loras: Adapters a request may name.
        preview: Whether it can show small pictures while it runs.
        known_as: The model of the table of known settings that it is; None where it is none.
        default_sources: The page that a default is from, where it is known for that model.
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
    default_true_cfg_scale: float | None = None
    default_negative_prompt: str | None = None
    schedulers: tuple[str, ...] = ()
    full_run_schedulers: tuple[str, ...] = ()
    max_pixels: int = 4_194_304
    max_prompt_tokens: int | None = None
    max_images: int = 0
    strength: bool = False
    default_strength: float | None = None
    default_frames: int | None = None
    frames_step: int = 1
    max_frames: int | None = None
    default_fps: float | None = None
    loras: tuple[str, ...] = ()
    preview: bool = False
    known_as: str | None = None
    default_sources: Mapping[str, str] = field(default_factory=dict)

    def takes_strength(self, task: str) -> bool:
        """Tell whether requests of that task may say how much of their image is made anew."""
        return self.strength and task in {IMAGE_TO_IMAGE, INPAINT}

    def schedulers_for(self, task: str) -> tuple[str, ...]:
        """Return the noise schedulers that requests of that task may name."""
        refused = self.full_run_schedulers if self.takes_strength(task) else ()
        return tuple(name for name in self.schedulers if name not in refused)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote; names a newer version added are left out."""
        kept = _known(cls, data)
        return cls(
            **{
                **kept,
                "tasks": tuple(kept["tasks"]),
                "schedulers": tuple(kept.get("schedulers", ())),
                "full_run_schedulers": tuple(kept.get("full_run_schedulers", ())),
                "loras": tuple(kept.get("loras", ())),
            }
        )


def _known(cls: type[Parameters | Abilities], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in data.items() if name in names}
