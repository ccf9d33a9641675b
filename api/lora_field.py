"""The field `lora` of a request: one adapter or several, each with its scale.

Knows the form; which adapters a model has is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from marshmallow import ValidationError, fields

_MAX_LORAS: Final = 8
_MAX_SCALE: Final = 100.0
# Characters of a name that a message shows.
_SHOWN: Final = 64
_LORA: Final = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "scale": {"type": "number", "minimum": -_MAX_SCALE, "maximum": _MAX_SCALE, "default": 1.0},
    },
    "additionalProperties": False,
}


class LoraField(fields.Field[list[dict[str, Any]]]):
    """`{"name": ..., "scale": ...}`, or a list of such; as a list of both."""

    def __init__(self) -> None:
        """Show both forms in OpenAPI."""
        super().__init__(
            metadata={
                "description": "Adapter by name, or a list of them, each with its weight; the "
                "model lists them.",
                "anyOf": [_LORA, {"type": "array", "items": _LORA, "maxItems": _MAX_LORAS}],
            }
        )

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> list[dict[str, Any]]:
        entries = value if isinstance(value, list) else [value]
        if len(entries) > _MAX_LORAS:
            raise ValidationError(f"has {len(entries)} adapters; {_MAX_LORAS} is the most")
        loras = [_lora(entry) for entry in entries]
        names = [lora["name"] for lora in loras]
        for name in names:
            if names.count(name) > 1:
                raise ValidationError(f"names {name[:_SHOWN]!r} twice; give one scale for it")
        return loras


def _lora(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValidationError('is no adapter; write {"name": "...", "scale": 1.0}, or a list')
    unknown = sorted(set(entry) - {"name", "scale"})
    if unknown:
        raise ValidationError(f"has {unknown[0][:_SHOWN]!r}; name and scale are all it takes")
    scale = entry.get("scale", 1.0)
    right = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not right or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        raise ValidationError(
            f"has a scale for {entry['name'][:_SHOWN]!r} that is no number from "
            f"-{_MAX_SCALE:g} to {_MAX_SCALE:g}"
        )
    return {"name": entry["name"], "scale": float(scale)}
