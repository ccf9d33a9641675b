"""The Lua scripts: each change of a record or of the registry is one of them, and so atomic.

The names of keys and fields are laid before each script, made from the tables of `routing/keys.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from redis import Redis
from redis.commands.core import Script

from routing.keys import RECORD, REPLICA, TOTALS, Key, Keys

_FOLDER = Path(__file__).parent
_BEFORE_ALL = ("record", "choice")


def _names() -> Iterator[str]:
    """Yield the lines that define `key` and `fields` for the scripts; KEYS[1] is the prefix."""
    yield "local prefix, key, fields = KEYS[1], {}, {}"
    for name, kind in vars(Keys).items():
        if isinstance(kind, Key):
            first, *rest = kind.pattern.split("{}")
            parts = [f"part{number}" for number in range(len(rest))]
            text = "".join(
                f" .. {part} .. '{after}'" for part, after in zip(parts, rest, strict=True)
            )
            value = f"prefix .. '{first}'{text}"
            if parts:
                value = f"function({', '.join(parts)}) return {value} end"
            yield f"key.{name} = {value}"
    for name, table in (("record", RECORD), ("replica", REPLICA), ("totals", TOTALS)):
        yield f"fields.{name} = {{{', '.join(f'{field.name} = true' for field in table)}}}"


@cache
def source(name: str) -> str:
    """Return the whole text of a script, as Redis gets it."""
    parts = (_FOLDER / f"{part}.lua" for part in (*_BEFORE_ALL, name))
    return "\n".join((*_names(), *(part.read_text() for part in parts)))


class Scripts:
    """Calls scripts by name under one key prefix."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._known: dict[str, Script] = {}

    def call(self, name: str, *args: str | float, fields: Mapping[str, str] | None = None) -> Any:
        """Run the script `name` with `args`, then `fields` as name, value pairs.

        Raises:
            redis.RedisError: Redis did not answer or refused the script.
        """
        script = self._known.get(name)
        if script is None:
            script = self._known[name] = self._redis.register_script(source(name))
        pairs = [part for pair in (fields or {}).items() for part in pair]
        texts = [repr(arg) if isinstance(arg, float) else str(arg) for arg in args]
        return script(keys=[self._prefix], args=[*texts, *pairs])
