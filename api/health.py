"""The calls for whoever supervises the service: is the API up, and can it serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flask import g
from flask_smorest import Blueprint

from api.http.fields import AnswerSchema, always, nested, text, whole
from api.service import Service
from configs.errors import FieldError, NoReadyReplica
from configs.stage_config import StageConfig
from routing.replica import Replica, ReplicaState, not_ready

_RETRY_S: Final = 1.0


class HealthSchema(AnswerSchema):
    """The API is up."""

    status = always("ok")


@dataclass(frozen=True, slots=True)
class StageReadiness:
    """A stage and how many of its replicas are ready."""

    stage: int
    model: str
    ready_replicas: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """All stages, each of which can serve."""

    stages: list[StageReadiness]


class StageReadinessSchema(AnswerSchema):
    """A stage that can serve."""

    stage = whole("Its number.")
    model = text("Its model.")
    ready_replicas = whole("At least 1.")


class ReadinessSchema(AnswerSchema):
    """Every stage can serve."""

    status = always("ready")
    stages = nested(StageReadinessSchema, many=True)


blueprint = Blueprint("health", __name__, description="For whoever supervises the service.")


@blueprint.route("/health", methods=["GET"])
@blueprint.response(200, HealthSchema)
def health() -> object:
    """Say that this process answers; Redis and the replicas are not asked."""
    return object()


@blueprint.route("/ready", methods=["GET"])
@blueprint.response(200, ReadinessSchema)
def ready() -> Readiness:
    """Say whether Redis answers and every stage has a ready replica; 503 names what is missing."""
    service: Service = g.service
    replicas = service.registry.all()
    standing = [(stage, _of_stage(stage, replicas)) for stage in service.stages]
    missing = [
        FieldError(
            f"stage {stage.stage_id}",
            not_ready(stage.stage_id, stage.model_name, own),
            NoReadyReplica.code,
        )
        for stage, own in standing
        if not _ready(own)
    ]
    if missing:
        raise NoReadyReplica(
            "\n".join(f"{error.param}: {error.message}" for error in missing),
            details=missing,
            retry_after=_RETRY_S,
        )
    return Readiness(
        [
            StageReadiness(stage.stage_id, stage.model_name, len(_ready(own)))
            for stage, own in standing
        ]
    )


def _of_stage(stage: StageConfig, replicas: Sequence[Replica]) -> list[Replica]:
    return [
        replica
        for replica in replicas
        if replica.heartbeat.stage == stage.stage_id and replica.heartbeat.model == stage.model_name
    ]


def _ready(replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.state is ReplicaState.READY]
