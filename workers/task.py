"""The Celery task: a wake-up that makes the replica take the next request of its line.

Does not know what a request is: the replica claims, runs and records it.
"""

from __future__ import annotations

from celery import shared_task

from routing.broker import RUN_TASK
from workers.replica import current


@shared_task(name=RUN_TASK)
def run(request_id: str, attempt: int) -> str | None:
    """Run the first request of the line; its id, or None where nothing waited.

    ``request_id`` and ``attempt`` name the request that caused the wake-up, for whoever reads
    Flower or the logs. Another one may be first in the line by now, by its priority; its own
    wake-up then serves this one.
    """
    del request_id, attempt
    return current().run_next()
