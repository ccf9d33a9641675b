"""The calls for models: what each supports, within which limits, and its defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from flask import g
from flask_smorest import Blueprint
from marshmallow import Schema, fields

from api.http.fields import (
    AnswerSchema,
    ListSchema,
    Page,
    always,
    described,
    nested,
    text,
    texts,
    whole,
)
from api.models.catalog import ServedModel
from api.requests.checks import all_formats, max_pixels, most_of
from api.service import Service
from configs.errors import NotFound
from configs.fields import Parameter
from configs.parameters import MAX_SEED, PARAMETERS, VIDEO_TASKS, Abilities
from configs.settings import Settings
from routing.replica import Replica, ReplicaState


@dataclass(frozen=True, slots=True)
class ShownModel:
    """A model, the replicas that have it, and the settings that limit it."""

    model: ServedModel
    replicas: Sequence[Replica]
    settings: Settings

    def supports(self, parameter: Parameter) -> bool:
        """Tell whether any task of the model has the parameter."""
        abilities = self.model.abilities
        return any(abilities.supports(parameter, task) for task in abilities.tasks)


# The parameters that not every model supports, and the numbers that the service limits.
_OPTIONAL = [each for each in PARAMETERS.values() if each.ability or each.tasks]
_LIMITED = [
    each
    for each in PARAMETERS.values()
    if each.type is int and (each.limit or each.ability in Abilities.counted())
]


def _limit_fields(*, of_some_tasks: bool) -> dict[str, fields.Field[Any]]:
    return {
        each.name: whole(each.about, allow_none=of_some_tasks)
        for each in _LIMITED
        if bool(each.tasks or not each.limit) is of_some_tasks
    }


class TakesSchema(Schema):
    """Which parameters the model supports."""

    class Meta:
        include: ClassVar[dict[str, fields.Field[Any]]] = {
            each.name: fields.Boolean() for each in _OPTIONAL
        }


class LimitsSchema(Schema):
    """The largest value of each parameter."""

    class Meta:
        include: ClassVar[dict[str, fields.Field[Any]]] = {
            "max_pixels": whole("Width x height of one output."),
            **_limit_fields(of_some_tasks=False),
            "images": whole("Input images of one request."),
            **_limit_fields(of_some_tasks=True),
            "video_pixels": whole("Width x height x frames of a video.", allow_none=True),
            "prompt_characters": whole("Longer prompts are refused."),
            "prompt_tokens": whole("Longer prompts are cut, with a warning.", allow_none=True),
            "seed": whole("Seed of the last output."),
        }


def _created(shown: ShownModel) -> int:
    return int(min((replica.heartbeat.started_at for replica in shown.replicas), default=0))


def _ready(shown: ShownModel) -> int:
    return sum(replica.state is ReplicaState.READY for replica in shown.replicas)


def _frames_step(shown: ShownModel) -> int | None:
    abilities = shown.model.abilities
    return abilities.frames_step if VIDEO_TASKS & set(abilities.tasks) else None


def _supported(shown: ShownModel) -> dict[str, bool]:
    return {each.name: shown.supports(each) for each in _OPTIONAL}


def _limits(shown: ShownModel) -> dict[str, Any]:
    abilities, settings = shown.model.abilities, shown.settings
    makes_videos = VIDEO_TASKS & set(abilities.tasks)
    return {
        "max_pixels": max_pixels(shown.model, settings),
        **{
            each.name: most_of(each, abilities, settings) if shown.supports(each) else None
            for each in _LIMITED
        },
        "images": abilities.max_images,
        "video_pixels": settings.max_video_pixels if makes_videos else None,
        "prompt_characters": settings.max_prompt_chars,
        "prompt_tokens": abilities.max_prompt_tokens,
        "seed": MAX_SEED,
    }


def _defaults(shown: ShownModel) -> dict[str, Any]:
    abilities = shown.model.abilities
    own = {
        each.name: getattr(abilities, each.default) for each in PARAMETERS.values() if each.default
    }
    return {
        **shown.model.defaults,
        "guidance_scale": None,  # stands there for models without it too
        **{name: value for name, value in own.items() if value is not None},
    }


def _dtype_sources(shown: ShownModel) -> dict[str, str]:
    sources = shown.model.abilities.dtype_sources
    return {
        part: sources.get(part, sources.get("default", "rule"))
        for part in shown.model.abilities.dtypes
    }


def _default_sources(shown: ShownModel) -> dict[str, str]:
    known, staged = shown.model.abilities.default_sources, shown.model.defaults
    return {
        name: "stage" if name in staged else known.get(name, "pipeline")
        for name in _defaults(shown)
    }


class ModelObjectSchema(AnswerSchema):
    """A model, as OpenAI lists it, with what it can do."""

    id = text("Its name.", attrgetter("model.name"))
    aliases = texts("Other names by which it can be asked for.", attrgetter("model.aliases"))
    object = always("model")
    created = whole("When the oldest of its replicas started; 0 where none lives.", _created)
    owned_by = always("diffusion-replicas")
    ready_replicas = whole("Replicas in the rotation.", _ready)
    tasks = texts()
    size_multiple = whole("Width and height are multiples of it.")
    frames_step = whole(
        "A video has 1 frame and a multiple of it more.", _frames_step, allow_none=True
    )
    schedulers = texts("Noise schedulers, the model's own first.")
    full_run_schedulers = texts(
        "Those of them that tasks with a `strength` refuse: they begin at the first step."
    )
    scheduler_settings = fields.Dict(
        keys=fields.String(),
        values=fields.Dict(keys=fields.String()),
        metadata=described(
            "What differs from, or is said beside, the configuration of the model's own scheduler: "
            "its `value`, the `saved` one, and the `source`: `stage`, or the address of the page "
            "that says what suits the model."
        ),
    )
    loras = texts("Adapters to name in `lora`.")
    output_formats = texts(of=lambda shown: all_formats(shown.model.abilities))
    takes = nested(TakesSchema, _supported)
    limits = nested(LimitsSchema, _limits)
    defaults = fields.Dict(
        keys=fields.String(),
        attribute=_defaults,  # type: ignore[arg-type]
        metadata=described("Values of what a request leaves out."),
    )
    known_as = text("The model of docs/models.md whose settings it has.", allow_none=True)
    default_sources = fields.Dict(
        keys=fields.String(),
        values=fields.String(),
        attribute=_default_sources,  # type: ignore[arg-type]
        metadata=described(
            "Where each default is from: `stage`, `pipeline`, or the address of the page that says "
            "what suits the model."
        ),
    )
    dtypes = fields.Dict(
        keys=fields.String(),
        values=fields.String(),
        metadata=described("The type of the weights of each of its parts."),
    )
    dtype_sources = fields.Dict(
        keys=fields.String(),
        values=fields.String(),
        attribute=_dtype_sources,  # type: ignore[arg-type]
        metadata=described(
            "Where each of them is from: `stage`, `rule` (docs/models.md has the rules), or the "
            "address of the page that says what suits the model."
        ),
    )

    def get_attribute(self, obj: ShownModel, attr: Any, default: Any) -> Any:
        """Return the value of a field of a model."""
        return attr(obj) if callable(attr) else getattr(obj.model.abilities, attr)


class ModelListSchema(ListSchema):
    """Models, by name."""

    data = nested(ModelObjectSchema, many=True)


blueprint = Blueprint("models", __name__, description="What can be asked for.")


@blueprint.route("/v1/models", methods=["GET"])
@blueprint.response(200, ModelListSchema)
def models() -> Page:
    """List the models that some replica has loaded."""
    service: Service = g.service
    replicas = service.registry.all()
    return Page([_shown(service, model, replicas) for model in service.catalog.loaded().values()])


@blueprint.route("/v1/models/<path:name>", methods=["GET"])
@blueprint.response(200, ModelObjectSchema)
def model(name: str) -> ShownModel:
    """Say what one model can do, by its name or an alias."""
    service: Service = g.service
    found = service.catalog.named(name)
    if found is None:
        raise NotFound(
            f"No replica has loaded a model {name[:80]!r}; GET /v1/models lists those that can be "
            "asked for.",
            param="name",
        )
    return _shown(service, found, service.registry.all())


def _shown(service: Service, model: ServedModel, replicas: Sequence[Replica]) -> ShownModel:
    own = [replica for replica in replicas if replica.heartbeat.model == model.name]
    return ShownModel(model, own, service.settings)
