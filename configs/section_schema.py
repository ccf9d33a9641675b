"""The base of every mapping in a stage file: nulls and unknown keys.

It knows no key itself; the sections stand in `stage_schema.py`.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Final

from marshmallow import EXCLUDE, Schema, ValidationError, pre_load, validates_schema

from configs.refusal import UNKNOWN_KEY

_NEAR: Final = 0.6
_SHORTEST_PART: Final = 4


class SectionSchema(Schema):
    """One mapping of the file. A null counts as a key left out; an unknown key is refused.

    Attributes:
        section: Where it stands, as a person would write it.
    """

    class Meta:
        """Unknown keys are refused by hand, with the nearest known one."""

        unknown: ClassVar[str] = EXCLUDE

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
        known = ", ".join(sorted(self.fields))
        return f"{UNKNOWN_KEY}; {self._mend(key)} (known here: {known})"

    def _mend(self, key: str) -> str:
        """What was probably meant: the key of another section, or one spelt nearly so."""
        others = [other for other in self._sections if not isinstance(self, other)]
        home = next((other.section for other in others if key in other._declared_fields), None)
        near = _nearest(key, self.fields)
        if home and near:
            return f"did you mean {near}, or does it belong {home}?"
        if home:
            return f"it belongs {home}"
        if near:
            return f"did you mean {near}?"
        for other in others:
            near = _nearest(key, other._declared_fields)
            if near:
                return f"did you mean {near}, which belongs {other.section}?"
        return "take it out"


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that contains the given one, or is spelt most like it."""
    key = key.lower()
    known = list(known)
    if len(key) >= _SHORTEST_PART:
        for name in known:
            if key in name or name in key:
                return name
    return next(iter(get_close_matches(key, known, n=1, cutoff=_NEAR)), None)
