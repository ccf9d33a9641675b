"""The Lua scripts: every change of a record or of the registry is one of them, and so atomic.

Knows how to load and call them. Does not know what they are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from redis import Redis
from redis.commands.core import Script

_FOLDER = Path(__file__).parent
_BEFORE_ALL = ("record", "choice")


@cache
def _source(name: str) -> str:
    return "".join((_FOLDER / f"{part}.lua").read_text() for part in (*_BEFORE_ALL, name))


class Scripts:
    """Calls scripts by name under one key prefix."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._known: dict[str, Script] = {}

    def call(self, name: str, *args: str | float, fields: Mapping[str, str] | None = None) -> Any:
        """Run the script ``name`` with ``args``, then ``fields`` as name, value pairs.

        Raises:
            redis.RedisError: Redis did not answer or refused the script.
        """
        script = self._known.get(name)
        if script is None:
            script = self._known[name] = self._redis.register_script(_source(name))
        pairs = [part for pair in (fields or {}).items() for part in pair]
        texts = [repr(arg) if isinstance(arg, float) else str(arg) for arg in args]
        return script(keys=[self._prefix], args=[*texts, *pairs])
