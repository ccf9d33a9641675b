"""What a field may be: field types, what is known of a parameter, and the errors of schemas."""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, get_origin, get_type_hints

from marshmallow import (
    EXCLUDE,
    Schema,
    ValidationError,
    fields,
    pre_load,
    validate,
    validates_schema,
)

from configs.errors import FieldError


def readers(*kinds: type) -> dict[str, fields.Field[Any]]:
    """Return the readers of the fields of dataclasses, for `Meta.include` of a schema.

    A field's reader stands in its annotation: `steps: Annotated[int, Whole(1, 50, "steps")] = 20`.
    """
    return {
        name: extra
        for kind in kinds
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if get_origin(hint) is Annotated
        for extra in hint.__metadata__
        if isinstance(extra, fields.Field)
    }


_NEAR: Final = 0.6
_VERY_NEAR: Final = 0.85
_SHORTEST_PART: Final = 4
_LONGEST: Final = 100  # characters of a name that are looked at


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant: much alike, else a part of it, or alike."""
    name, known = name[:_LONGEST].lower(), list(known)
    alike = get_close_matches(name, known, n=1, cutoff=_VERY_NEAR)
    if not alike and len(name) >= _SHORTEST_PART:
        alike = [other for other in known if other in name or name in other]
    return next(iter(alike or get_close_matches(name, known, n=1, cutoff=_NEAR)), None)


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: `1 device`, `2 devices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def choices(words: Iterable[str]) -> str:
    """Return the words as a sentence lists them: `png, jpeg or webp`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


class Whole(fields.Integer):
    """A whole number of some unit, within bounds where there are any; with `strict` no text."""

    def __init__(
        self,
        low: int | None = None,
        high: int | None = None,
        unit: str = "",
        *,
        strict: bool = True,
        missing: str = "is missing",
        **options: Any,
    ) -> None:
        """Build the reasons from the bounds (both allowed) and the unit."""
        fix = "" if low is None else f"; give a whole number from {low} to {high} ({unit})"
        invalid, out_of_range = f"is not a whole number{fix}", f"is out of range{fix}"
        if low is not None:
            options["validate"] = validate.Range(low, high, error=out_of_range)
        super().__init__(
            strict=strict,
            error_messages={
                "invalid": invalid,
                "too_large": out_of_range if fix else invalid,
                "required": missing,
            },
            **options,
        )
        self.unit = unit


class Number(fields.Float):
    """A finite number of some unit, within bounds where there are any; with `strict` no text."""

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        unit: str = "",
        *,
        strict: bool = True,
        **options: Any,
    ) -> None:
        """Build the reasons from the bounds (both allowed) and the unit."""
        fix = "" if low is None else f"; give a number from {low:.15g} to {high:.15g} ({unit})"
        invalid = f"is not a number{fix}"
        if low is not None:
            options["validate"] = validate.Range(low, high, error=f"is out of range{fix}")
        super().__init__(
            error_messages={"invalid": invalid, "special": invalid, "too_large": invalid},
            **options,
        )
        self.unit = unit
        self._strict = strict

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> float:
        if self._strict and isinstance(value, str):
            raise self.make_error("invalid", input=value)
        return super()._deserialize(value, attr, data)


class Text(fields.String):
    """Text, and no number instead; with an `example`, which messages show, not blank either."""

    def __init__(self, example: str = "", **options: Any) -> None:
        """Build the reasons from the example."""
        invalid, required = "is not text", "is missing"
        if example:
            invalid += f"; give text such as {example!r}, a number in quotes"
            required += f"; write one such as {example!r}"
            blank = f"is empty; give text such as {example!r}, or leave the key out"
            options["validate"] = validate.Regexp(r"(?s).*\S", error=blank)
        super().__init__(error_messages={"invalid": invalid, "required": required}, **options)


class Flag(fields.Boolean):
    """true or false; with `strict` no word or number instead."""

    def __init__(self, *, strict: bool = True, **options: Any) -> None:
        """Take text such as "yes" too where it is not strict, as the environment has it."""
        reason = "is not a boolean; use true or false"
        super().__init__(error_messages={"invalid": reason}, **options)
        self._strict = strict

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> bool:
        if self._strict and not isinstance(value, bool):
            raise self.make_error("invalid", input=value)
        return super()._deserialize(value, attr, data)


class OneOf(fields.String):
    """One word out of a few."""

    def __init__(self, *words: str, **options: Any) -> None:
        """Build the reasons from the words."""
        reason = f"is not available; use {choices(words)}"
        super().__init__(
            error_messages={"invalid": reason},
            validate=validate.OneOf(words, error=reason),
            **options,
        )


class Editable(StrEnum):
    """Until when a field of a request may be edited: never, while it is queued, while it runs."""

    NEVER = "never"
    QUEUED = "queued"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is known of one parameter.

    Attributes:
        about: What it means, in one sentence that users read.
        low: The least it may be; None for what is not bounded.
        high: The most it may be.
        limit: The setting, and where the model has one too its ability, that say the most it may
            be; of a text the most characters.
        unit: What a number counts.
        words: The words that a text may be.
        example: For the docs, and for messages about a text in a stage file.
        ability: The ability that a model needs for it; one that is a number and no truth value is
            the most that the parameter may be.
        off: Values that ask for nothing, so that models without the ability have them already.
        tasks: The tasks that have it; None for all.
        default: The ability that says the model's default; without one it is that of the field.
        default_tasks: The tasks that have this default, where not all of `tasks` do.
        stage_default: Whether a stage file may set a default.
        stage_bounds: The bounds of that default, where they are not `low` and `high`.
        editable: Until when it may be edited.
        argument: Whether the pipeline's call gets it by this name, where it has such an argument.
        name: Its name.
        type: `int`, `float`, `str` or `bool`, or `tuple` for a list.
        nullable: Whether it may be None.
        fallback: What it is where neither a request nor the model says more.
        required: Whether there is no such fallback.
    """

    about: str
    low: float | None = None
    high: float | None = None
    limit: str = ""
    unit: str = ""
    words: tuple[str, ...] = ()
    example: str = ""
    ability: str = ""
    off: tuple[float, ...] = ()
    tasks: frozenset[str] | None = None
    default: str = ""
    default_tasks: frozenset[str] | None = None
    stage_default: bool = False
    stage_bounds: tuple[float, float] | None = None
    editable: Editable = Editable.QUEUED
    argument: bool = False
    name: str = ""
    type: type = str
    nullable: bool = False
    fallback: Any = None
    required: bool = False


_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SCHEMA_KEY: Final = "_schema"
UNKNOWN_KEY: Final = "is an unknown key"


def field_errors(refused: ValidationError, source: Any) -> list[FieldError]:
    """Return one error for each reason in `refused`; `source` is what the schema was given."""
    return [
        FieldError(path, with_value(reason, value), _code(reason))
        for path, value, reason in _reasons(refused.messages_dict, source, "")
    ]


def _reasons(messages: Any, source: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Walk the messages and the source together: (path, value found there or None, reason)."""
    if isinstance(messages, Mapping):
        for key, inner in messages.items():
            if key == _SCHEMA_KEY:
                yield from _reasons(inner, source, path)
            elif isinstance(key, int):
                yield from _reasons(inner, _item(source, key), f"{path}[{key}]")
            else:
                yield from _reasons(inner, _item(source, key), f"{path}.{key}" if path else key)
    else:
        for reason in messages:
            yield path, source, str(reason)


def _item(source: Any, key: Any) -> Any:
    if isinstance(source, Mapping):
        return source.get(key)
    if isinstance(source, Sequence) and not isinstance(source, str) and isinstance(key, int):
        return source[key]
    return None


def with_value(reason: str, value: Any) -> str:
    """Put the value before the reason, shortened; an unknown key and a missing one have none."""
    if value is None or reason.startswith(UNKNOWN_KEY):
        return reason
    return f"{_SHORT.repr(value)} {reason}"


def _code(reason: str) -> str:
    if reason.startswith(UNKNOWN_KEY):
        return "unknown_key"
    return "missing" if reason.startswith("is missing") else "invalid"


class SectionSchema(Schema):
    """One mapping of the file. A null counts as a key left out; an unknown key is refused.

    Attributes:
        section: Where it stands, as a person would write it.
    """

    class Meta:
        unknown: ClassVar[str] = EXCLUDE  # refused by `_refuse_unknown`, with the nearest one

    error_messages = {  # noqa: RUF012 - declared an instance variable by marshmallow
        "type": "is not a mapping; write `key: value` lines beneath it"
    }
    section: ClassVar[str] = ""
    _sections: ClassVar[list[type["SectionSchema"]]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        """Note the section, so that a key in the wrong one can be sent home."""
        super().__init_subclass__(**options)
        cls._sections.append(cls)

    @pre_load
    def _drop_nulls(self, data: Any, **_: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None}

    @validates_schema(pass_original=True, skip_on_field_errors=False)
    def _refuse_unknown(self, _: Any, original: Any, **__: Any) -> None:
        if not isinstance(original, Mapping):
            return
        unknown = [key for key in original if key not in self.fields]
        if unknown:
            raise ValidationError({str(key): [self._unknown(str(key))] for key in unknown})

    def _unknown(self, key: str) -> str:
        """What is wrong with it, and what was probably meant: maybe a key of another section."""
        others = [other for other in self._sections if not isinstance(self, other)]
        home = next((other.section for other in others if key in other._declared_fields), None)
        near = nearest(key, self.fields)
        if home and near:
            return f"{UNKNOWN_KEY}; did you mean {near}, or does it belong {home}?"
        if home:
            return f"{UNKNOWN_KEY}; it belongs {home}"
        if near:
            return f"{UNKNOWN_KEY}; did you mean {near}?"
        for other in others:
            near = nearest(key, other._declared_fields)
            if near:
                return f"{UNKNOWN_KEY}; did you mean {near}, which belongs {other.section}?"
        return f"{UNKNOWN_KEY}; remove it (allowed: {', '.join(sorted(self.fields))})"
