"""The Flask application: one factory that puts the calls together.

Importing has no effect, and neither has `create_app` beyond opening what is lazy: the threads of a
process start with `service_of(app).start()`, which `api/server.py` calls in each worker.
"""

from __future__ import annotations

from typing import Any, Final

from flask import Flask
from flask_smorest import Api

from api import docs, health, metrics, page, replicas
from api.auth import register_access
from api.errors import ErrorAnswerSchema, register_error_handlers
from api.http.call import register_call_hooks
from api.models import views as models
from api.openai import chat, images, videos
from api.requests import events, files
from api.requests import views as requests
from api.service import Service, attach_service
from configs.settings import Settings, load_settings

VERSION: Final = "0.1.0"
_DESCRIPTION: Final = (
    "Diffusion pipelines behind one API. Submit a request, then poll it, wait for it or cancel "
    "it; errors have one shape everywhere."
)


def create_app(settings: Settings | None = None) -> Flask:
    """Make the application; without `settings` they are read from the environment.

    Raises:
        ConfigurationError: The environment or the stage file is refused.
    """
    settings = settings or load_settings()
    app = Flask(__name__, static_folder=None)
    app.config.update(_configuration(settings))
    app.json.sort_keys = False  # type: ignore[attr-defined]
    service = Service.open(settings)
    attach_service(app, service)
    _register_calls(app)
    # After the calls: flask-smorest brings a handler of its own, which ours replaces.
    register_error_handlers(app)
    register_call_hooks(app, service)
    register_access(app, settings.api_key)
    return app


def _configuration(settings: Settings) -> dict[str, Any]:
    return {
        "MAX_CONTENT_LENGTH": settings.max_body_bytes,
        # A text in a form may be a data URL, as large as any body.
        "MAX_FORM_MEMORY_SIZE": settings.max_body_bytes,
        "API_TITLE": "Diffusion Replicas",
        "API_VERSION": VERSION,
        "OPENAPI_VERSION": "3.0.3",
        "OPENAPI_URL_PREFIX": "/",
        "OPENAPI_JSON_PATH": "openapi.json",
        "API_SPEC_OPTIONS": {"info": {"description": _DESCRIPTION}},
    }


def _register_calls(app: Flask) -> None:
    api = Api()
    api.ERROR_SCHEMA = ErrorAnswerSchema
    api.init_app(app)
    for blueprint in (
        requests.blueprint,
        events.blueprint,
        files.inputs_blueprint,
        files.outputs_blueprint,
        images.blueprint,
        chat.blueprint,
        videos.blueprint,
        replicas.blueprint,
        models.blueprint,
        health.blueprint,
    ):
        api.register_blueprint(blueprint)
    app.register_blueprint(metrics.blueprint)
    app.register_blueprint(docs.blueprint)
    app.register_blueprint(page.blueprint)
