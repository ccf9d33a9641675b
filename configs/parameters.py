"""The generation parameters of a request, one table for all, and what a model supports of them.

The table is the annotations of :class:`Parameters`. The schemas of bodies, edits, answers and stage
defaults, the checks, and what `/v1/models` says of a model are made of it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Final, Self, get_args, get_origin, get_type_hints

from configs.fields import Editable, Parameter

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
MAX_SEED: Final = 2**63 - 1
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


def _side(default: str) -> Parameter:
    return Parameter(
        "Pixels; a multiple of the model's size multiple.",
        low=1,
        unit="pixels",
        default=default,
        stage_default=True,
        stage_bounds=(8, 65_536),
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

    Images stand by their names in the output store; None leaves a value to the pipeline.
    """

    # fmt: off
    prompt: Annotated[str, Parameter(
        "What the output shows.", limit="max_prompt_chars", example="a red circle")]
    seed: Annotated[int, Parameter(
        "Seed of output 0; output k has seed + k, 2^63 - 1 at most. Drawn where none is given.",
        low=0, high=MAX_SEED, unit="seed", stage_default=True)]
    width: Annotated[int, _side("default_width")]
    height: Annotated[int, _side("default_height")]
    num_inference_steps: Annotated[int, Parameter(
        "Denoising steps; image to image runs only the share `strength` of them.",
        low=1, limit="max_steps", unit="steps",
        default="default_steps", stage_default=True, stage_bounds=(1, 100_000))]
    task: Annotated[str, Parameter(
        "What the pipeline does; picked from the inputs where none is given: `inpaint` with a "
        "mask, a task with image input with an image, else one from text alone.")] = TEXT_TO_IMAGE
    negative_prompt: Annotated[str | None, Parameter(
        "What the output does not show.", limit="max_prompt_chars", example="blurry",
        ability="negative_prompt", argument=True,
        default="default_negative_prompt", stage_default=True)] = None
    guidance_scale: Annotated[float | None, Parameter(
        "Weight of the prompt (classifier-free guidance, Ho & Salimans 2022).",
        low=0, high=100, unit="guidance scale", ability="guidance_scale", off=(0, 1), argument=True,
        default="default_guidance_scale", stage_default=True, editable=Editable.RUNNING)] = None
    true_cfg_scale: Annotated[float | None, Parameter(
        "Weight of the prompt for guidance-distilled families that support a true one too.",
        low=0, high=100, unit="guidance scale", ability="true_cfg_scale", off=(0, 1), argument=True,
        default="default_true_cfg_scale", stage_default=True, editable=Editable.RUNNING)] = None
    guidance_scale_2: Annotated[float | None, Parameter(
        "Weight of the prompt in the low-noise half; `guidance_scale` where none is given.",
        low=0, high=100, unit="guidance scale", ability="guidance_scale_2", argument=True,
        stage_default=True)] = None
    guidance_rescale: Annotated[float | None, Parameter(
        "Share of guidance's gain in contrast that is taken back (Lin et al. 2023).",
        low=0, high=1, unit="share", ability="guidance_rescale", off=(0,), argument=True,
        stage_default=True)] = None
    clip_skip: Annotated[int | None, Parameter(
        "Last layers of the text encoder that are left out, beyond what the pipeline leaves out.",
        low=0, high=100, unit="layers", ability="clip_skip", off=(0,), argument=True,
        stage_default=True)] = None
    prompt_weighting: Annotated[bool, Parameter(
        "Reads `(word:1.3)` in prompts as a weight of the word; else it is text.",
        ability="prompt_weighting", stage_default=True)] = False
    max_sequence_length: Annotated[int | None, Parameter(
        "Most tokens of a prompt that the model reads.",
        low=1, high=100_000, unit="tokens", ability="max_sequence_length", argument=True,
        stage_default=True)] = None
    num_outputs_per_prompt: Annotated[int, Parameter(
        "How many outputs; output k has seed + k.", low=1, limit="max_outputs", unit="outputs",
        stage_default=True, stage_bounds=(1, 10_000))] = 1
    scheduler: Annotated[str | None, Parameter(
        "Noise scheduler by class name; the model's own where none is given.",
        example="DDIMScheduler", stage_default=True)] = None
    lora: Annotated[tuple[Lora, ...], Parameter(
        "Adapter by name, or a list of them, each with its weight; the model lists them.",
        default="default_lora", stage_default=True)] = ()
    image: Annotated[tuple[str, ...], Parameter(
        "Input picture, or a list of them: PNG, JPEG or WebP as a data URL, or files in a form. "
        "Where neither width nor height is given, the output has the shape of the first one and "
        "about as many pixels as is usual for the model.",
        tasks=FROM_IMAGE_TASKS)] = ()
    mask_image: Annotated[str | None, Parameter(
        "Mask as large as `image`: what is white or transparent in it is painted anew.",
        tasks=frozenset({INPAINT}))] = None
    padding_mask_crop: Annotated[int | None, Parameter(
        "Paints only the surroundings of the mask, with so many pixels about it, at full size.",
        low=0, high=10_000, unit="pixels", ability="padding_mask_crop", argument=True,
        tasks=frozenset({INPAINT}), stage_default=True)] = None
    strength: Annotated[float | None, Parameter(
        "How much of the first image is made anew: 1 all of it, with all steps.",
        low=0, high=1, unit="share of the steps", argument=True,
        ability="strength", tasks=frozenset({IMAGE_TO_IMAGE, INPAINT}), stage_default=True,
        # Inpainting has another default, of each pipeline's own.
        default="default_strength", default_tasks=frozenset({IMAGE_TO_IMAGE}))] = None
    num_frames: Annotated[int | None, Parameter(
        "Frames of a video: 1 and a multiple of the model's `frames_step` more.",
        low=1, limit="max_frames", unit="frames", tasks=VIDEO_TASKS,
        default="default_frames", stage_default=True, stage_bounds=(1, 100_000))] = None
    fps: Annotated[float | None, Parameter(
        "Frames in a second of a video.", low=1, high=120, unit="frames in a second",
        tasks=VIDEO_TASKS, default="default_fps", stage_default=True)] = None
    output_format: Annotated[str, Parameter(
        "File format of the outputs; png, or mp4 for videos, by default.",
        words=OUTPUT_FORMATS, stage_default=True)] = "png"
    output_compression: Annotated[int | None, Parameter(
        "Quality of jpeg and webp.", low=0, high=100, unit="quality", stage_default=True)] = None
    deterministic: Annotated[bool, Parameter(
        "Runs alone, so that the bytes are equal on any replica.")] = False
    preview: Annotated[bool, Parameter(
        "Shows small pictures of it in its events while it runs.",
        ability="preview", editable=Editable.RUNNING)] = False
    # fmt: on

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

    def shares(self) -> str:
        """Return what requests have in common that can share calls of the denoiser.

        Empty for one that shares with nobody.
        """
        if self.deterministic:
            return ""
        adapters = "+".join(sorted(f"{each.name}:{each.scale:g}" for each in self.lora or ()))
        return f"{self.task} {self.width}x{self.height}x{self.num_frames or 1} {adapters}".strip()

    def asks(self, name: str) -> bool:
        """Whether a parameter that may be left out is there."""
        value = getattr(self, name)
        return value is not None and value is not False

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with ``changes`` laid over it; raises TypeError for an unknown name."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping of all parameters, None included."""
        # Not by `asdict`, which copies each value by itself: six times as long, in each submit.
        values = {name: getattr(self, name) for name in PARAMETERS}
        values["lora"] = [asdict(each) for each in self.lora]
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote; names a newer version added are left out."""
        kept = {name: data[name] for name in PARAMETERS if name in data}
        kept["image"] = tuple(kept.get("image", ()))
        kept["lora"] = tuple(Lora(**each) for each in kept.get("lora", ()))
        return cls(**kept)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a loaded model can do, published by its replicas so that the API can check requests.

    Attributes:
        tasks: Pipeline tasks it serves.
        size_multiple: Width and height must be multiples of it, in pixels.
        default_width: Pixels, used when the request names no size.
        default_height: Pixels.
        default_steps: Denoising steps when the request names none.
        default_guidance_scale: None where the pipeline's own default stands.
        negative_prompt: Whether the pipeline supports one.
        true_cfg_scale: Whether the pipeline supports one.
        default_true_cfg_scale: None where the pipeline supports none.
        default_negative_prompt: None where requests that name none get none.
        guidance_scale: Whether the pipeline supports one.
        guidance_scale_2: Whether a second denoiser has a weight of its own (Wan 2.2).
        guidance_rescale: Whether the pipeline supports it.
        prompt_weighting: Whether words of its prompts may be weighed.
        clip_skip: Most layers; 0 where the pipeline supports none.
        max_sequence_length: Most tokens; 0 where the pipeline supports none.
        padding_mask_crop: Whether inpainting supports it.
        schedulers: Noise schedulers a request may name, the model's own first.
        full_run_schedulers: Those of them that begin at the first step only; tasks that
            support a strength refuse them.
        max_pixels: Largest width x height one output may have.
        max_prompt_tokens: Tokens the tokenizer keeps; None where there is no such limit.
        max_images: Input images one request may have; 0 where no task has any.
        strength: Whether image-to-image supports one; editing models do not.
        default_strength: None where the pipeline's own default stands.
        default_frames: Frames of a video when the request names none; None for images.
        frames_step: A video has one frame and a multiple of this many more.
        max_frames: Most frames of one video.
        default_fps: Frames in a second when the request names none; None for images.
        scheduler_steps: The most steps of a whole run, of noise schedulers that have such a limit.
        scheduler_settings: What a stage or the table of known settings says of the scheduler: its
            `value`, the `saved` one of the model, and its `source`, as in `dtype_sources`.
        loras: Adapters a request may name.
        default_lora: Those of requests that name none, with their scales; None where there are
            none.
        preview: Whether it can show small pictures while it runs.
        known_as: The model of the table of known settings that it is; None where it is none.
        default_sources: The page that a default is from, where it is known for that model.
        dtypes: The type of the weights of each part.
        dtype_sources: Of those and of `default`: `stage`, `rule`, or the page that it is from.
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
    guidance_scale_2: bool = False
    guidance_rescale: bool = False
    prompt_weighting: bool = False
    clip_skip: int = 0
    max_sequence_length: int = 0
    padding_mask_crop: bool = False
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
    scheduler_steps: Mapping[str, int] = field(default_factory=dict)
    scheduler_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loras: tuple[str, ...] = ()
    default_lora: tuple[Mapping[str, Any], ...] | None = None
    preview: bool = False
    known_as: str | None = None
    default_sources: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dtype_sources: Mapping[str, str] = field(default_factory=dict)

    def supports(self, parameter: Parameter, task: str) -> bool:
        """Tell whether requests of that task may have the parameter."""
        return (parameter.tasks is None or task in parameter.tasks) and (
            not parameter.ability or bool(getattr(self, parameter.ability))
        )

    def most(self, parameter: Parameter) -> int | None:
        """Return the most that this model lets a parameter be; None where it says nothing."""
        for name in filter(None, (parameter.limit, parameter.ability)):
            value = getattr(self, name, None)
            if value and value is not True:
                return int(value)
        return None

    @classmethod
    def counted(cls) -> frozenset[str]:
        """Return the abilities that are the most of a parameter rather than a truth value."""
        return frozenset(
            each.ability
            for each in PARAMETERS.values()
            if each.ability and cls.__dataclass_fields__[each.ability].type == "int"
        )

    def supports_strength(self, task: str) -> bool:
        """Tell whether requests of that task may say how much of their image is made anew."""
        return self.supports(PARAMETERS["strength"], task)

    def schedulers_for(self, task: str) -> tuple[str, ...]:
        """Return the noise schedulers that requests of that task may name."""
        refused = self.full_run_schedulers if self.supports_strength(task) else ()
        return tuple(name for name in self.schedulers if name not in refused)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote; names a newer version added are left out."""
        names = cls.__dataclass_fields__
        return cls(
            **{
                **{name: value for name, value in data.items() if name in names},
                "tasks": tuple(data["tasks"]),
                "schedulers": tuple(data.get("schedulers", ())),
                "full_run_schedulers": tuple(data.get("full_run_schedulers", ())),
                "loras": tuple(data.get("loras", ())),
                "default_lora": tuple(chosen) if (chosen := data.get("default_lora")) else None,
            }
        )


def _table() -> dict[str, Parameter]:
    """Read the annotations of :class:`Parameters`, in its order."""
    hints = get_type_hints(Parameters, include_extras=True)
    found = {}
    for each in fields(Parameters):
        annotation, parameter = get_args(hints[each.name])
        kinds = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        kind = kinds[0]
        found[each.name] = replace(
            parameter,
            name=each.name,
            type=get_origin(kind) or kind,
            nullable=type(None) in kinds,
            fallback=None if each.default is MISSING else each.default,
            required=each.default is MISSING,
        )
    return found


PARAMETERS: Final[Mapping[str, Parameter]] = _table()
# What a pipeline's call gets as it is, where it has an argument of that name.
ARGUMENTS: Final = tuple(name for name, parameter in PARAMETERS.items() if parameter.argument)
