"""What of a request may still be changed, by where it stands.

Does not know the values it is changed to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from configs.errors import NotEditable, NotEditableWhileRunning
from routing.outcome import Status
from routing.record import Request

_NEVER_CHANGED: Final = frozenset({"affinity_key", "metadata", "model", "webhook"})
_CHANGED_WHILE_RUNNING: Final = frozenset(
    {"guidance_scale", "preview", "timeout", "true_cfg_scale"}
)


def refuse_by_state(body: Mapping[str, Any], request: Request) -> None:
    """Refuse a change that comes too late, or that none is allowed of.

    Raises:
        NotEditable: The request has ended, or a field never changes.
        NotEditableWhileRunning: The engine can not change a field between two steps.
    """
    if request.is_terminal:
        raise NotEditable(
            f"Request {request.id} is {request.status}; what has ended stays as it is."
        )
    fixed = sorted(_NEVER_CHANGED.intersection(body))
    if fixed:
        raise NotEditable(
            f"{', '.join(fixed)} of a request never changes; send a new one.", param=fixed[0]
        )
    late = sorted(set(body) - _CHANGED_WHILE_RUNNING)
    if request.status is Status.RUNNING and late:
        raise NotEditableWhileRunning(
            f"{', '.join(late)} can not be changed while the request runs; "
            f"{' and '.join(sorted(_CHANGED_WHILE_RUNNING))} can.",
            param=late[0],
        )
