"""The body of a call, as JSON or as a form, by its content type.

Does not know what the fields mean.
"""

from __future__ import annotations

from typing import Any

from marshmallow import Schema

from api.form_body import FORM, is_form, read_form
from api.json_body import JSON, read_json_object


def read_body(schema: Schema) -> dict[str, Any]:
    """Return the fields of the call at hand; a form's texts become what `schema` has them as.

    Raises:
        MalformedRequest: It can not be read.
        werkzeug.exceptions.RequestEntityTooLarge: It is larger than a body may be.
    """
    return read_form(schema) if is_form() else read_json_object()


def body_content(schema: type[Schema], *types: str) -> dict[str, Any]:
    """Return what OpenAPI shows of a body: JSON and a form, or the `types` that are given."""
    content = {media_type: {"schema": schema} for media_type in types or (JSON, FORM)}
    return {"required": True, "content": content}
