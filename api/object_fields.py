"""The fields of what calls answer, each with its description: the spec's half of the contract.

`api/presentation.py` makes the values.
"""

from __future__ import annotations

from typing import Any

from marshmallow import Schema, fields, validate


def text(description: str, **more: Any) -> fields.String:
    """Return a text that the spec describes."""
    return fields.String(metadata={"description": description}, **more)


def whole(description: str, **more: Any) -> fields.Integer:
    """Return a whole number that the spec describes."""
    return fields.Integer(metadata={"description": description}, **more)


def number(description: str, **more: Any) -> fields.Float:
    """Return a number that the spec describes."""
    return fields.Float(metadata={"description": description}, **more)


def one_of(words: Any, description: str) -> fields.String:
    """Return one of some words."""
    names = [str(word) for word in words]
    return fields.String(validate=validate.OneOf(names), metadata={"description": description})


class ListSchema(Schema):
    """The one shape of all lists."""

    object = text("Always `list`.")
    has_more = fields.Boolean(metadata={"description": "Whether there is a next page."})
