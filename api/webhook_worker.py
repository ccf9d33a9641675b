"""The Celery app that sends webhooks: ``celery -A api.webhook_worker worker -Q webhooks``.

A queue of its own, so that an address that answers slowly holds up no replica and no call. A
message is only a wake-up; the sweep of the API sends it when something is due.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Final

from celery import Celery

from api.webhook_sender import WebhookSender
from configs.errors import ConfigurationError
from configs.settings import Settings, load_settings
from routing.broker import DELIVER_TASK, WEBHOOK_QUEUE, celery_settings
from routing.connection import connect
from routing.router import Router

_AT_ONCE: Final = 8


def make_app(settings: Settings) -> Celery:
    """Make the app; nothing is connected yet."""
    made = Celery("webhooks", set_as_current=False)
    made.conf.update(
        celery_settings(settings),
        worker_pool="threads",
        worker_concurrency=_AT_ONCE,
        worker_hijack_root_logger=False,
        task_default_queue=WEBHOOK_QUEUE,
    )
    return made


try:
    app = make_app(load_settings())
except ConfigurationError as refused:
    sys.exit(f"Error: {refused}")


@cache
def _sender() -> WebhookSender:
    settings = load_settings()
    router = Router.open(settings, connect(settings.redis_url))
    return WebhookSender(settings, router.store, router.deliveries)


@app.task(name=DELIVER_TASK)
def deliver() -> int:
    """Send what is due; how many there were."""
    return _sender().send_due()
