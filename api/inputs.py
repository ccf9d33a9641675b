"""The call for an input image: the bytes that the client sent, as they are.

Does not decode them; they were checked when they came in.
"""

from __future__ import annotations

import hashlib

from flask import Response
from flask import request as call
from flask_smorest import Blueprint

from api.input_files import all_inputs
from api.service import current_service
from configs.errors import NotFound
from routing.formats import IMAGE_FORMATS, MEDIA_TYPES

_FILE_SCHEMA = {"type": "string", "format": "binary"}

blueprint = Blueprint("inputs", __name__, description="The pictures that requests began with.")


@blueprint.route("/v1/requests/<request_id>/inputs/<int:index>", methods=["GET"])
@blueprint.doc(
    responses={
        200: {
            "description": "The file as it was sent; its ETag is the SHA-256 of its bytes.",
            "content": {MEDIA_TYPES[form]: {"schema": _FILE_SCHEMA} for form in IMAGE_FORMATS},
        }
    }
)
@blueprint.alt_response(304, description="It is the one whose ETag was sent.", success=True)
def fetch_input(request_id: str, index: int) -> Response:
    """Return input image `index`, counted from 0; the mask comes after the images."""
    service = current_service()
    request = service.router.store.get(request_id)
    names = all_inputs(request.parameters)
    if index >= len(names):
        raise NotFound(
            f"Request {request.id} has {len(names)} input images; there is none with index "
            f"{index}.",
            param="index",
        )
    name = names[index]
    try:
        data = service.router.outputs.read(name)
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
