"""The pipelines of one model, one for each task, and the copy of one that each run gets."""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import diffusers
from transformers import PreTrainedTokenizerBase

from configs.errors import GenerationFailed, ModelLoadFailed
from configs.parameters import (
    FROM_IMAGE_TASKS,
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    Abilities,
    Parameters,
)
from workers.engine.arguments import Inputs, arguments_of, left_out
from workers.engine.generation import byte_frames
from workers.engine.schedulers import is_flow, made_scheduler, staged_sigmas
from workers.families import FRAME_COUNTS, family_of
from workers.patches import note_device, put

# Tokenizers without a limit say 1e30.
_SANE = 1_000_000


# Encoders whose places are reckoned and not learnt have configurations with far more.
_MOST_PLACES = 1024


_MARK = "prompt"


def prompt_limits(pipe: Any, asked: int | None = None) -> list[tuple[Any, int]]:
    """Return the tokenizers whose text encoder is loaded, each with the tokens it keeps.

    `asked` is the `max_sequence_length` of a request that names one.
    """
    length = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
    if asked is None and length is not None and isinstance(length.default, int):
        asked = length.default
    asked = family_of(pipe).prompt_tokens or asked
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
    if not family_of(pipe).counts_chat_template or not tokenizer.chat_template:
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
    return (f"{name}: the last {cut} tokens were cut, because the model reads at most {limit}",)


def _cut_warnings(
    limits: Callable[[int | None], list[tuple[Any, int]]],
    name: str,
    text: str | None,
    most: int | None,
) -> tuple[str, ...]:
    return cut_warnings(limits(most), name, text)


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, truncation=False, verbose=False).input_ids)


# What a call may require; anything else no client can give.
_SERVED_ARGUMENTS = frozenset(("self", "prompt", "image", "mask_image"))


# Declared optional, and the pipeline raises without them; a video not where there may be an image.
_FOREIGN_ARGUMENTS = frozenset(("control_image", "control_video", "video", "reference_images"))


def task_pipelines(pipe: Any) -> dict[str, Any]:
    """Return a pipeline for each task that the parts of `pipe` can do, its own task first.

    To be made when `forward` of the denoiser is what it will stay: a sibling may keep it.

    Raises:
        ModelLoadFailed: When there is none that is served here.
    """
    found = {}
    for task, pipeline_class in task_classes(pipe).items():
        found[task] = pipe if isinstance(pipe, pipeline_class) else _sibling(pipe, pipeline_class)
    return found


def task_classes(pipe: Any) -> dict[str, Any]:
    """Return the pipeline class of each task; raises ModelLoadFailed when there is none."""
    name, own = type(pipe).__name__, type(pipe)
    schedulers = [part for part in pipe.components.values() if hasattr(part, "set_timesteps")]
    if len(schedulers) != 1:
        raise ModelLoadFailed(
            f"{name} has {len(schedulers)} noise schedulers; pipelines with one are served"
        )
    tasks = {} if _needs_more(pipe) else dict.fromkeys(own_tasks(own), own)
    if not tasks:
        raise ModelLoadFailed(
            f"{name} makes neither images nor videos from a prompt, or needs more than a prompt, an"
            " image and a mask; such pipelines are not served"
        )
    for task, sibling in _siblings(pipe).items():
        if task not in tasks and _has_parts_for(pipe, sibling) and task in own_tasks(sibling):
            tasks[task] = sibling
    return tasks


def own_tasks(pipeline_class: Any) -> tuple[str, ...]:
    """Return the tasks of a class, by the signature of its call; none where it is not served."""
    taken = arguments_of(pipeline_class)
    required = {
        name
        for name, parameter in taken.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    foreign = _FOREIGN_ARGUMENTS - ({"video"} if "image" in taken else set())
    if "prompt" not in taken or required - _SERVED_ARGUMENTS or taken.keys() & foreign:
        return ()
    from_text = "image" not in taken or _image_is_optional(pipeline_class)
    if taken.keys() & set(FRAME_COUNTS):
        text, image = TEXT_TO_VIDEO, IMAGE_TO_VIDEO
    else:
        text, image = TEXT_TO_IMAGE, INPAINT if "mask_image" in taken else IMAGE_TO_IMAGE
    tasks = (*((text,) if from_text else ()), *((image,) if "image" in taken else ()))
    # Where the size is not an argument, it is that of the image.
    return tasks if "image" in taken or taken.keys() >= {"width", "height"} else ()


def _needs_more(pipe: Any) -> bool:
    """Tell whether the parts need an image that requests have no field for."""
    parts = pipe.components
    several_adapters = type(parts.get("adapter")).__name__ == "MultiAdapter"
    config = getattr(parts.get("transformer"), "config", {})
    last_image = config.get(family_of(pipe).last_image_key)
    return "controlnet" in parts or several_adapters or bool(last_image)


def _image_is_optional(pipeline_class: Any) -> bool:
    # Pipelines that need an image too declare `image=None` and raise when it is missing; the lists
    # tell them apart.
    listed = _mapping("TEXT2IMAGE"), _mapping("TEXT2VIDEO")
    return any(pipeline_class in mapping.values() for mapping in listed)


def _siblings(pipe: Any) -> dict[str, Any]:
    """Classes of other tasks that diffusers lists for the family of `pipe`."""
    own = type(pipe)
    for source, targets in (
        ("TEXT2IMAGE", {IMAGE_TO_IMAGE: "IMAGE2IMAGE", INPAINT: "INPAINT"}),
        ("TEXT2VIDEO", {IMAGE_TO_VIDEO: "IMAGE2VIDEO"}),
    ):
        family = next((key for key, found in _mapping(source).items() if found is own), None)
        if family is not None:
            listed = {task: _mapping(target).get(family) for task, target in targets.items()}
            unlisted = family_of(pipe).image_to_video
            if unlisted is not None:
                listed[IMAGE_TO_VIDEO] = getattr(diffusers, unlisted)
            return {task: found for task, found in listed.items() if found is not None}
    return {}


def _mapping(name: str) -> Mapping[str, Any]:
    # Imported here, for it imports every family.
    from diffusers.pipelines import auto_pipeline

    mapping: Mapping[str, Any] = getattr(auto_pipeline, f"AUTO_{name}_PIPELINES_MAPPING")
    return mapping


def _parts_for(pipe: Any, pipeline_class: Any) -> dict[str, Any]:
    """What of `pipe` the class is made of: parts, and entries of the configuration."""
    takes = inspect.signature(pipeline_class.__init__).parameters
    have = {**pipe.config, **pipe.components}
    return {name: value for name, value in have.items() if name in takes}


def _has_parts_for(pipe: Any, pipeline_class: Any) -> bool:
    takes = inspect.signature(pipeline_class.__init__).parameters
    needed = {
        name
        for name, parameter in takes.items()
        if name != "self" and parameter.default is inspect.Parameter.empty
    }
    return needed <= _parts_for(pipe, pipeline_class).keys()


def _sibling(pipe: Any, pipeline_class: Any) -> Any:
    """A pipeline of another class over the same parts.

    Not by `from_pipe`, which casts the shared weights (to float32 unless told, and all to one type
    if told).
    """
    parts = _parts_for(pipe, pipeline_class)
    if "mask_image" in arguments_of(pipeline_class) and {"unet", "vae"} <= parts.keys():
        parts["unet"] = _as_four_channels(parts["unet"], parts["vae"])
    sibling = pipeline_class(**parts)
    sibling.set_progress_bar_config(disable=True)
    return sibling


def _as_four_channels(unet: Any, vae: Any) -> Any:
    """The same denoiser, saying that it takes four channels, if it takes those of the autoencoder.

    Inpainting pipelines of U-Nets tell denoisers that see the mask (9 channels) from all others by
    the number 4, and refuse autoencoders of more channels than that.
    """
    if unet.config.in_channels != vae.config.latent_channels:
        return unet
    view = copy.copy(unet)
    view.register_to_config(in_channels=4)
    return view


_TEXTS_KEPT = 256


class PipelineCopies:
    """Makes copies of a loaded pipeline.

    Attributes:
        classes: Of the pipelines of each task.
    """

    def __init__(self, pipe: Any, abilities: Abilities, *, frames_as_bytes: bool = False) -> None:
        """Copy `pipe` and those that other tasks make of its parts.

        With `frames_as_bytes` pipelines for videos give bytes where they would give floats.
        """
        self._pipe = pipe
        self._abilities = abilities
        # Prompts, and negative ones above all, come again.
        self._cut_warnings = lru_cache(_TEXTS_KEPT)(
            partial(_cut_warnings, lru_cache(_TEXTS_KEPT)(partial(prompt_limits, pipe)))
        )
        self._pipes = task_pipelines(pipe)
        self._sigmas = staged_sigmas(pipe.scheduler)
        self.classes = {task: type(each) for task, each in self._pipes.items()}
        for each in self._pipes.values():
            note_device(each)
        pipes = self._pipes.items() if frames_as_bytes else ()
        found = {task: byte_frames(each) for task, each in pipes}
        self._frames = {task: each for task, each in found.items() if each is not None}

    def copy_for(self, parameters: Parameters, inputs: Inputs) -> Any:
        """Return a copy for one run.

        Raises:
            GenerationFailed: The model has not the task or the scheduler, or an input is missing.
        """
        task = parameters.task
        if task not in self._pipes:
            raise GenerationFailed(
                f"task: {task} is not available for this model; use {', '.join(self._pipes)}"
            )
        if task in FROM_IMAGE_TASKS and not inputs.images:
            raise GenerationFailed(f"image: {task} needs an image")
        if task == INPAINT and inputs.mask is None:
            raise GenerationFailed(f"mask_image: {task} needs a mask")
        return self._copy_with_scheduler(task, parameters.scheduler)

    def prompt_warnings(self, parameters: Parameters) -> list[str]:
        """Return sentences on what the pipeline leaves out or cuts; uses the tokenizers."""
        kind = self.classes[parameters.task]
        warnings = [
            f"{name}: {kind.__name__} does not support it; it was ignored"
            for name in left_out(parameters, kind)
        ]
        if self._sigmas and not self._has_sigmas(parameters):
            warnings.append(
                f"num_inference_steps, scheduler: the {len(self._sigmas)} sigmas of this stage"
                " belong to as many steps of its own scheduler; those of another were taken"
            )
        for name in ("prompt", "negative_prompt"):
            if name in arguments_of(kind):
                text, most = getattr(parameters, name), parameters.max_sequence_length
                warnings += self._cut_warnings(name, text, most)
        return warnings

    def _has_sigmas(self, parameters: Parameters) -> bool:
        own, name = self._pipe.scheduler, parameters.scheduler
        same = name in (None, type(own).__name__) or is_flow(own)
        return same and parameters.num_inference_steps == len(self._sigmas)

    def _copy_with_scheduler(self, task: str, name: str | None) -> Any:
        own, fitting = self._pipe.scheduler, self._abilities.schedulers_for(task)
        name = name or type(own).__name__
        if name not in (type(own).__name__, *fitting):
            raise GenerationFailed(
                f"scheduler: {name} does not fit {task} of this model; use {', '.join(fitting)}"
            )
        scheduler = made_scheduler(own, name)
        pipe = copy.copy(self._pipes[task])
        put(pipe, "scheduler", scheduler, over=True)
        # What it does for one pipeline alone would be done to all that share the parts.
        put(pipe, "maybe_free_model_hooks", _nothing)
        if task in self._frames:
            put(pipe, "video_processor", self._frames[task], over=True)
        return pipe


def _nothing() -> None:
    pass
