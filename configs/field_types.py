"""Marshmallow fields whose refusals name the mend, for the environment and the stage file.

A reason begins with a verb (`is not a whole number; ...`): whoever prints it puts the value before
it. The fields know nothing of where the value came from.
"""

from typing import Any

from marshmallow import fields, validate


class Whole(fields.Integer):
    """A whole number of some unit, within bounds; with `strict` text such as "3" is refused."""

    def __init__(
        self,
        low: int,
        high: int,
        unit: str,
        *,
        strict: bool = True,
        missing: str = "is missing",
        **options: Any,
    ) -> None:
        """Build the reasons from the bounds (both allowed) and the unit."""
        mend = f"give a whole number from {low} to {high} ({unit})"
        invalid = f"is not a whole number; {mend}"
        out_of_range = f"is out of range; {mend}"
        super().__init__(
            strict=strict,
            error_messages={"invalid": invalid, "too_large": out_of_range, "required": missing},
            validate=validate.Range(low, high, error=out_of_range),
            **options,
        )


class Number(fields.Float):
    """A finite number of some unit, within bounds; with `strict` text such as "3.5" is refused."""

    def __init__(
        self, low: float, high: float, unit: str, *, strict: bool = True, **options: Any
    ) -> None:
        """Build the reasons from the bounds (both allowed) and the unit."""
        mend = f"give a number from {low:.15g} to {high:.15g} ({unit})"
        invalid = f"is not a number; {mend}"
        super().__init__(
            error_messages={"invalid": invalid, "special": invalid, "too_large": invalid},
            validate=validate.Range(low, high, error=f"is out of range; {mend}"),
            **options,
        )
        self._strict = strict

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> float:
        if self._strict and isinstance(value, str):
            raise self.make_error("invalid", input=value)
        return super()._deserialize(value, attr, data)


class Text(fields.String):
    """Text that is not blank; `example` shows the reader what is meant."""

    def __init__(self, example: str, **options: Any) -> None:
        """Build the reasons from the example."""
        super().__init__(
            error_messages={
                "invalid": f"is not text; give text such as {example!r}, a number in quotes",
                "required": f"is missing; write one such as {example!r}",
            },
            validate=validate.Regexp(
                r"(?s).*\S", error=f"is empty; give text such as {example!r}, or leave the key out"
            ),
            **options,
        )


class OneOf(fields.String):
    """One word out of a few."""

    def __init__(self, *words: str, **options: Any) -> None:
        """Build the reasons from the words."""
        reason = f"is not one of the words known here; give one of {', '.join(words)}"
        super().__init__(
            error_messages={"invalid": reason},
            validate=validate.OneOf(words, error=reason),
            **options,
        )
