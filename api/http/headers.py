"""What a client may ask for in headers: to wait (`Prefer`), and to be safe against sending twice.

Does not know what is waited for.
"""

from __future__ import annotations

import re
from typing import Final

from flask import request

from configs.errors import MalformedRequest

IDEMPOTENCY_KEY: Final = "Idempotency-Key"


_MAX_KEY: Final = 255


_WAIT: Final = re.compile(r'wait\s*=\s*"?(.*?)"?\Z', re.IGNORECASE)


_SECONDS: Final = re.compile(r"[0-9]{1,9}\Z")


def idempotency_key() -> str:
    """Return the client's own name for the call at hand, empty for none.

    Raises:
        MalformedRequest: It is empty, longer than 255 characters, or not printable ASCII.
    """
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return ""
    if not (1 <= len(key) <= _MAX_KEY and key.isascii() and key.isprintable()):
        raise MalformedRequest(
            f"{IDEMPOTENCY_KEY} has 1 to {_MAX_KEY} printable ASCII characters.",
            param=IDEMPOTENCY_KEY,
        )
    return key


def preferred_wait(most_s: float) -> int:
    """Return how many seconds the client would wait (`Prefer: wait=N`), `most_s` at most.

    0 means that it would not.
    Other preferences may be left aside (RFC 7240), and are.

    Raises:
        MalformedRequest: N is not a whole number of seconds.
    """
    for preference in ",".join(request.headers.getlist("Prefer")).split(","):
        match = _WAIT.match(preference.split(";")[0].strip())
        if match is None:
            continue
        if not _SECONDS.match(match[1]):
            raise MalformedRequest(
                f"Prefer: wait={match[1][:20]} is not a whole number of seconds.", param="Prefer"
            )
        return min(int(match[1]), int(most_s))
    return 0
