"""Which tasks one set of weights can do, and the pipeline of each.

A model is saved as a pipeline of one task; diffusers lists the classes of other tasks that run with
the same parts. Those share the parts, so that a further task costs no memory. Knows nothing of
requests and of how a pipeline is called.
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import diffusers

from configs.errors import ModelLoadFailed
from routing.tasks import IMAGE_TO_IMAGE, IMAGE_TO_VIDEO, INPAINT, TEXT_TO_IMAGE, TEXT_TO_VIDEO
from workers.engine.pipeline_arguments import FRAME_COUNTS, arguments_of

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
    # Wan that was trained with a first and a last image.
    config = getattr(parts.get("transformer"), "config", {})
    last_image = type(pipe).__name__.startswith("Wan") and bool(config.get("pos_embed_seq_len"))
    return "controlnet" in parts or several_adapters or last_image


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
            if pipe.config.get("expand_timesteps"):
                # Wan 2.2 5B: these weights alone were trained for both.
                listed[IMAGE_TO_VIDEO] = diffusers.WanImageToVideoPipeline
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
