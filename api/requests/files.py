"""The calls for the files of a request: its input images and its outputs."""

from __future__ import annotations

import hashlib
import logging

from flask import Response, g
from flask import request as call
from flask_smorest import Blueprint

from api.requests.inputs import all_inputs
from api.service import Service
from configs.errors import NotFound
from configs.parameters import IMAGE_FORMATS, MEDIA_TYPES
from routing.request import Output, Request

_logger = logging.getLogger(__name__)


_FILE_SCHEMA = {"type": "string", "format": "binary"}


inputs_blueprint = Blueprint(
    "inputs", __name__, description="The pictures that requests began with."
)


@inputs_blueprint.route("/v1/requests/<request_id>/inputs/<int:index>", methods=["GET"])
@inputs_blueprint.doc(
    responses={
        200: {
            "description": "The file as it was sent; its ETag is the SHA-256 of its bytes.",
            "content": {MEDIA_TYPES[form]: {"schema": _FILE_SCHEMA} for form in IMAGE_FORMATS},
        }
    }
)
@inputs_blueprint.alt_response(304, description="It is the one whose ETag was sent.", success=True)
def fetch_input(request_id: str, index: int) -> Response:
    """Return input image `index`, counted from 0; the mask comes after the images."""
    service: Service = g.service
    request = service.records.get(request_id)
    names = all_inputs(request.parameters)
    if index >= len(names):
        raise NotFound(
            f"Request {request.id} has {len(names)} input images; there is none with index "
            f"{index}.",
            param="index",
        )
    name = names[index]
    try:
        data = service.outputs.read(name)
    except FileNotFoundError:
        raise NotFound(f"The file of input {index} is gone.", param="index") from None
    digest = hashlib.sha256(data).hexdigest()
    if call.if_none_match.contains(digest):
        response = Response(status=304)
    else:
        form = name.rpartition(".")[2]
        response = Response(data, mimetype=MEDIA_TYPES[form])
        response.headers["Content-Disposition"] = (
            f'inline; filename="{request.id}-input-{index}.{form}"'
        )
    response.set_etag(digest)
    # An edit may put another picture in its place.
    response.headers["Cache-Control"] = "private, no-cache"
    return response


FILE_ANSWERS = {
    200: {
        "description": "The file; its ETag is the SHA-256 of its bytes.",
        "content": {media_type: {"schema": _FILE_SCHEMA} for media_type in MEDIA_TYPES.values()},
    }
}


outputs_blueprint = Blueprint("outputs", __name__, description="The files that requests produced.")


@outputs_blueprint.route("/v1/requests/<request_id>/outputs/<int:index>", methods=["GET"])
@outputs_blueprint.doc(responses=FILE_ANSWERS)
@outputs_blueprint.alt_response(
    206, description="The range of it that was asked for.", success=True
)
@outputs_blueprint.alt_response(304, description="It is the one whose ETag was sent.", success=True)
@outputs_blueprint.alt_response(416, description="The file has no such range.")
def fetch(request_id: str, index: int) -> Response:
    """Return the file of output `index`, counted from 0."""
    service: Service = g.service
    return output_response(service, service.records.get(request_id), index)


def output_response(service: Service, request: Request, index: int) -> Response:
    """Answer with the file of output `index` of a request.

    Raises:
        NotFound: There is none, or not any more.
    """
    output = _output(request, index)
    response = Response(status=304)
    data = b""
    if not call.if_none_match.contains(output.sha256):
        try:
            data = service.outputs.read(output.name)
        except FileNotFoundError:
            _logger.error("the file %s of request %s is gone", output.name, request.id)
            raise NotFound(f"The file of output {index} is gone; make it again.") from None
        response = Response(data, mimetype=output.media_type)
        name = f"{request.id}-{index}.{output.name.rpartition('.')[2]}"
        response.headers["Content-Disposition"] = f'inline; filename="{name}"'
    response.set_etag(output.sha256)
    age = int(service.settings.retention_s)
    response.headers["Cache-Control"] = f"private, max-age={age}, immutable"
    if data:
        # Players ask for parts of a video; some play none that cannot be had in parts.
        response.make_conditional(call, accept_ranges=True, complete_length=len(data))
    return response


def _output(request: Request, index: int) -> Output:
    if index < len(request.outputs):
        return request.outputs[index]
    if not request.is_terminal:
        raise NotFound(f"Request {request.id} is {request.status} and has no outputs yet.")
    raise NotFound(
        f"Request {request.id} is {request.status} with {len(request.outputs)} outputs; "
        f"there is none with index {index}.",
        param="index",
    )
