"""The call for models: what each supports, within which limits, and its defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flask_smorest import Blueprint
from marshmallow import Schema, fields

from api.http.fields import ListSchema, text, whole
from api.models.catalog import ServedModel
from api.requests.checks import MAX_SEED, all_formats, max_frames, max_pixels
from api.requests.objects import list_object
from api.service import current_service
from configs.parameters import FROM_IMAGE_TASKS, INPAINT, Abilities
from configs.settings import Settings
from routing.replica import Replica, ReplicaState


class TakesSchema(Schema):
    """Which parameters the pipeline takes."""

    negative_prompt = fields.Boolean()
    guidance_scale = fields.Boolean()
    true_cfg_scale = fields.Boolean()
    image = fields.Boolean()
    mask_image = fields.Boolean()
    strength = fields.Boolean()
    num_frames = fields.Boolean()
    fps = fields.Boolean()
    preview = fields.Boolean()


class LimitsSchema(Schema):
    """The largest value of each parameter."""

    max_pixels = whole("Width x height of one output.")
    num_inference_steps = whole("Denoising steps.")
    num_outputs_per_prompt = whole("Outputs of one request.")
    images = whole("Input images of one request.")
    num_frames = whole("Frames of a video.", allow_none=True)
    video_pixels = whole("Width x height x frames of a video.", allow_none=True)
    prompt_characters = whole("Longer prompts are refused.")
    prompt_tokens = whole("Longer prompts are cut, with a warning.", allow_none=True)
    seed = whole("Seed of the last output.")


class ModelObjectSchema(Schema):
    """A model, as OpenAI lists it, with what it can do."""

    id = text("Its name.")
    object = text("Always `model`.")
    created = whole("When the oldest of its replicas started; 0 where none lives.")
    owned_by = text("This service.")
    ready_replicas = whole("Replicas in the rotation.")
    tasks = fields.List(fields.String())
    size_multiple = whole("Width and height are multiples of it.")
    frames_step = whole("A video has 1 frame and a multiple of it more.", allow_none=True)
    schedulers = fields.List(
        fields.String(), metadata={"description": "Noise schedulers, the model's own first."}
    )
    full_run_schedulers = fields.List(
        fields.String(),
        metadata={
            "description": "Those of them that tasks with a `strength` refuse: they begin at the "
            "first step."
        },
    )
    loras = fields.List(fields.String(), metadata={"description": "Adapters to name in `lora`."})
    output_formats = fields.List(fields.String())
    takes = fields.Nested(TakesSchema)
    limits = fields.Nested(LimitsSchema)
    defaults = fields.Dict(
        keys=fields.String(), metadata={"description": "Values of what a request leaves out."}
    )
    known_as = text("The model of docs/models.md whose settings are known.", allow_none=True)
    default_sources = fields.Dict(
        keys=fields.String(),
        values=fields.String(),
        metadata={
            "description": "Where each default is from: `stage`, `pipeline`, or the address of a"
            " page that says what suits the model."
        },
    )


class ModelListSchema(ListSchema):
    """Models, by name."""

    data = fields.List(fields.Nested(ModelObjectSchema))


class HealthSchema(Schema):
    """The door is up."""

    status = text("Always `ok`.")


class StageReadinessSchema(Schema):
    """A stage that can serve."""

    stage = whole("Its number.")
    model = text("Its model.")
    ready_replicas = whole("At least 1.")


class ReadinessSchema(Schema):
    """Every stage can serve."""

    status = text("Always `ready`.")
    stages = fields.List(fields.Nested(StageReadinessSchema))


def model_object(
    model: ServedModel, replicas: Sequence[Replica], settings: Settings
) -> dict[str, Any]:
    """Return a model as OpenAI lists it, with what it can do; `replicas` are those that have it."""
    abilities = model.abilities
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
    return {
        "id": model.name,
        "object": "model",
        "created": int(min((replica.heartbeat.started_at for replica in replicas), default=0)),
        "owned_by": "diffusion-replicas",
        "ready_replicas": len(ready),
        "tasks": list(abilities.tasks),
        "size_multiple": abilities.size_multiple,
        "schedulers": list(abilities.schedulers),
        "full_run_schedulers": list(abilities.full_run_schedulers),
        "loras": list(abilities.loras),
        "frames_step": abilities.frames_step if _makes_videos(abilities) else None,
        "output_formats": all_formats(abilities),
        "takes": _takes(abilities),
        "limits": _limits(model, settings),
        "defaults": (defaults := _defaults(model)),
        "known_as": abilities.known_as,
        "default_sources": {name: _source(name, model) for name in defaults},
    }


def _defaults(model: ServedModel) -> dict[str, Any]:
    abilities = model.abilities
    return {
        **model.defaults,
        "width": abilities.default_width,
        "height": abilities.default_height,
        "num_inference_steps": abilities.default_steps,
        "guidance_scale": abilities.default_guidance_scale,
        **_default_parts(abilities),
    }


def _source(name: str, model: ServedModel) -> str:
    """Where a default is from."""
    if name in model.defaults:
        return "stage"
    return model.abilities.default_sources.get(name, "pipeline")


def _makes_videos(abilities: Abilities) -> bool:
    return abilities.default_frames is not None


def _takes(abilities: Abilities) -> dict[str, bool]:
    """Which of the parameters that not all models take this one does."""
    return {
        "negative_prompt": abilities.negative_prompt,
        "guidance_scale": abilities.guidance_scale,
        "true_cfg_scale": abilities.true_cfg_scale,
        "image": bool(FROM_IMAGE_TASKS & set(abilities.tasks)),
        "mask_image": INPAINT in abilities.tasks,
        "strength": abilities.strength,
        "num_frames": _makes_videos(abilities),
        "fps": _makes_videos(abilities),
        "preview": abilities.preview,
    }


def _limits(model: ServedModel, settings: Settings) -> dict[str, int | None]:
    video = _makes_videos(model.abilities)
    return {
        "max_pixels": max_pixels(model, settings),
        "num_inference_steps": settings.max_steps,
        "num_outputs_per_prompt": settings.max_outputs,
        "images": model.abilities.max_images,
        "num_frames": max_frames(model, settings) if video else None,
        "video_pixels": settings.max_video_pixels if video else None,
        "prompt_characters": settings.max_prompt_chars,
        "prompt_tokens": model.abilities.max_prompt_tokens,
        "seed": MAX_SEED,
    }


def _default_parts(abilities: Abilities) -> dict[str, Any]:
    """The defaults of what only some models take."""
    parts = {
        "true_cfg_scale": abilities.default_true_cfg_scale,
        "negative_prompt": abilities.default_negative_prompt,
        "strength": abilities.default_strength,
        "num_frames": abilities.default_frames,
        "fps": abilities.default_fps,
    }
    return {name: value for name, value in parts.items() if value is not None}


blueprint = Blueprint("models", __name__, description="What can be asked for.")


@blueprint.route("/v1/models", methods=["GET"])
@blueprint.response(200, ModelListSchema)
def models() -> dict[str, Any]:
    """List the models that some replica has loaded."""
    service = current_service()
    replicas = service.registry.all()
    return list_object(
        [
            model_object(
                model,
                [replica for replica in replicas if replica.heartbeat.model == model.name],
                service.settings,
            )
            for model in service.catalog.loaded().values()
        ]
    )
