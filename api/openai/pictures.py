"""Outputs of a finished request as OpenAI's answers carry them: in base64, or by address.

Does not know which call asks.
"""

from __future__ import annotations

import base64

from flask import request as call

from api.presentation import request_url
from api.service import Service
from configs.errors import NotFound
from routing.record import Request


def base64_of(service: Service, request: Request, index: int) -> str:
    """Return the file of output `index` in base64.

    Raises:
        NotFound: Its client removed it meanwhile.
    """
    try:
        data = service.router.outputs.read(request.outputs[index].name)
    except FileNotFoundError:
        raise NotFound(f"The outputs of request {request.id} were removed.") from None
    return base64.b64encode(data).decode()


def data_url_of(service: Service, request: Request, index: int) -> str:
    """Return the file of output `index` as a data URL.

    Raises:
        NotFound: Its client removed it meanwhile.
    """
    media_type = request.outputs[index].media_type
    return f"data:{media_type};base64,{base64_of(service, request, index)}"


def absolute_url(request: Request, index: int) -> str:
    """Return where output `index` can be fetched, with the host that the client called."""
    return f"{call.host_url.rstrip('/')}{request_url(request.id)}/outputs/{index}"
