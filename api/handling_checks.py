"""The checks of how a request is to be handled: its deadlines, and who is told of it.

Names every wrong field. Does not know generation parameters (`api/parameter_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from api.parameter_checks import shown
from api.webhook_post import address_fault
from configs.errors import FieldError
from configs.settings import Settings
from routing.record import Webhook

_MAX_SECONDS: Final = 31_536_000.0
_MAX_URL: Final = 2000


def seconds_faults(given: Mapping[str, Any]) -> list[FieldError]:
    """Return what is wrong with `expires_in` and `timeout`."""
    return [
        FieldError(
            name, f"{shown(given[name])} is not above 0 and at most {_MAX_SECONDS:.0f} seconds"
        )
        for name in ("expires_in", "timeout")
        if name in given and not 0 < given[name] <= _MAX_SECONDS
    ]


def webhook_of(given: Mapping[str, Any] | None) -> Webhook | None:
    """Return the webhook that a body names; of the end alone where it names no events."""
    return Webhook(given["url"], tuple(given.get("events", ["ended"]))) if given else None


def webhook_faults(given: Mapping[str, Any], settings: Settings) -> list[FieldError]:
    """Return what is wrong with a webhook of the right shape."""
    url = (given.get("webhook") or {}).get("url")
    if url is None:
        return []
    if not settings.webhook_secret:
        return [FieldError("webhook", "is not served here: WEBHOOK_SECRET is not set")]
    if len(url) > _MAX_URL:
        return [FieldError("webhook.url", f"has {len(url)} characters; {_MAX_URL} is the most")]
    fault = address_fault(url, allow_private=settings.webhook_allow_private)
    return [FieldError("webhook.url", fault)] if fault else []
