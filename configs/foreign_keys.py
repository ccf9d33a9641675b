"""Keys of vLLM-Omni's files that this service does not have: what becomes of a group of them."""

from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["file", "stage", "runtime", "engine_args", "parallel_config"]


@dataclass(frozen=True)
class ForeignKeys:
    """Keys of one place with the same fate.

    Attributes:
        place: Section of the reference dialect; `file` is the top of a deploy or stage_args file.
        names: The keys.
        why: What they are, after a verb or noun: the text of the refusal and of the table.
        neutral: Values that change nothing, so that they are only ignored; null always is one.
        always: Whether every value is ignored.
    """

    place: Place
    names: tuple[str, ...]
    why: str
    neutral: tuple[Any, ...] = ()
    always: bool = False

    def ignores(self, value: Any) -> bool:
        """Whether the value changes nothing here."""
        return self.always or value is None or any(_same(value, other) for other in self.neutral)

    @property
    def row(self) -> str:
        """Their row in the table of docs/configuration.md."""
        names = ", ".join(f"`{name}`" for name in self.names)
        if self.always:
            fate = "ignored"
        elif self.neutral:
            values = ", ".join(f"`{_yaml(value)}`" for value in self.neutral)
            fate = f"ignored if {values}, else refused"
        else:
            fate = "refused"
        return f"| {names} | {self.place} | {fate}: {self.why} |"


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def foreign_keys(
    place: Place, names: str, why: str, neutral: tuple[Any, ...] = (), *, always: bool = False
) -> ForeignKeys:
    """Return them, their names separated by blanks."""
    return ForeignKeys(place, tuple(names.split()), why, neutral, always)
