"""The call for models: what may be asked for, with limits and defaults.

Does not know where a model came from.
"""

from __future__ import annotations

from typing import Any

from flask_smorest import Blueprint

from api.model_objects import ModelListSchema
from api.model_presentation import model_object
from api.presentation import list_object
from api.service import current_service

blueprint = Blueprint("models", __name__, description="What can be asked for.")


@blueprint.route("/v1/models", methods=["GET"])
@blueprint.response(200, ModelListSchema)
def models() -> dict[str, Any]:
    """List the models that some replica has loaded."""
    service = current_service()
    replicas = service.router.registry.all()
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
