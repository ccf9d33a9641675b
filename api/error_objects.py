"""The schemas of errors: one shape for all calls.

`api/presentation.py` makes the values.
"""

from __future__ import annotations

from marshmallow import Schema, fields

from api.object_fields import text


class FieldErrorSchema(Schema):
    """One wrong field."""

    param = text("Path of the field.")
    message = text("What is wrong, and how to mend it.")
    code = text("Stable word for programs.")


class ErrorSchema(Schema):
    """What went wrong."""

    message = text("For people.")
    type = text("`invalid_request_error`, `rate_limit_error` or `server_error`.")
    param = text("The field or header that is wrong.", allow_none=True)
    code = text("Stable word for programs.")
    details = fields.List(fields.Nested(FieldErrorSchema))


class ErrorAnswerSchema(Schema):
    """The one shape of all errors."""

    error = fields.Nested(ErrorSchema)
