"""The Lua scripts: each change of a record or of the registry is one of them, and so atomic.

Scripts write `key.name` and `field.name`, which are looked up in the tables of `routing/keys.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from redis import Redis
from redis.commands.core import Script

from routing.keys import RECORD, REPLICA, TOTALS, Keys

_FOLDER = Path(__file__).parent
_BEFORE_ALL = ("record", "choice")
_NAMES = sorted({path.stem for path in _FOLDER.glob("*.lua")} - set(_BEFORE_ALL))


_KEY = re.compile(r"\bkey\.(\w+)")
_FIELD = re.compile(r"\bfield\.(\w+)")
FIELDS = frozenset(field.name for field in (*RECORD, *REPLICA, *TOTALS))


def linked(text: str) -> str:
    """Return a script with each `key.name` defined and each `field.name` replaced by its name.

    Raises:
        KeyError: The tables of `routing/keys.py` have no such name.
    """
    lines = ["local prefix, key = KEYS[1], {}"]
    for name in sorted(set(_KEY.findall(text))):
        first, *rest = vars(Keys)[name].pattern.split("{}")
        parts = [f"part{number}" for number in range(len(rest))]
        value = f"prefix .. '{first}'"
        for part, after in zip(parts, rest, strict=True):
            value += f" .. {part} .. '{after}'" if after else f" .. {part}"
        if parts:
            value = f"function({', '.join(parts)}) return {value} end"
        lines.append(f"key.{name} = {value}")
    if unknown := set(_FIELD.findall(text)) - FIELDS:
        raise KeyError(f"no field {', '.join(sorted(unknown))}")
    return "\n".join((*lines, _FIELD.sub(r"'\1'", text)))


@cache
def source(name: str) -> str:
    """Return the whole text of a script, as Redis gets it."""
    parts = (_FOLDER / f"{part}.lua" for part in (*_BEFORE_ALL, name))
    return linked("\n".join(part.read_text() for part in parts))


class Scripts:
    """Calls scripts by name under one key prefix."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._prefix = prefix
        # All at once, so that a wrong name ends the start and no call waits for the linking.
        self._known: dict[str, Script] = {
            name: redis.register_script(source(name)) for name in _NAMES
        }

    def call(self, name: str, *args: str | float, fields: Mapping[str, str] | None = None) -> Any:
        """Run the script `name` with `args`, then `fields` as name, value pairs.

        Raises:
            KeyError: There is no such script, or a field is not in the tables of `routing/keys.py`.
            redis.RedisError: Redis did not answer or refused the script.
        """
        script = self._known[name]
        if fields and not fields.keys() <= FIELDS:
            raise KeyError(f"no field {', '.join(sorted(fields.keys() - FIELDS))}")
        pairs = [part for pair in (fields or {}).items() for part in pair]
        texts = [repr(arg) if isinstance(arg, float) else str(arg) for arg in args]
        return script(keys=[self._prefix], args=[*texts, *pairs])
