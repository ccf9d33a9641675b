"""The Celery app that sends webhooks: ``celery -A api.webhooks.worker worker -Q webhooks``."""

from __future__ import annotations

import http.client
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from celery import Celery
from standardwebhooks import Webhook as Signer

from api.requests.answers import REQUEST, ShownRequest
from api.webhooks.post import DeliveryRefused, post
from configs.errors import ConfigurationError, NotFound
from configs.settings import Settings, load_settings
from routing.broker import DELIVER_TASK, WEBHOOK_QUEUE, celery_settings
from routing.connection import connect
from routing.outbox import Delivery, Outbox
from routing.records import Records
from routing.request import Request

_logger = logging.getLogger(__name__)


_GIVE_UP_S: Final = 3600.0
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 600.0
_LONGEST_FAULT: Final = 200


@dataclass(frozen=True, slots=True)
class WebhookSender:
    """Sends for one service."""

    settings: Settings
    records: Records
    outbox: Outbox
    clock: Callable[[], float] = time.time

    def send_due(self) -> int:
        """Send what is due and return how many there were.

        Raises:
            redis.RedisError: Redis did not answer; what was taken is due again in a minute.
        """
        sent = 0
        while (delivery := self.outbox.take()) is not None:
            self._send(delivery)
            sent += 1
        return sent

    def _send(self, delivery: Delivery) -> None:
        try:
            request = self.records.get(delivery.request_id)
        except NotFound:
            self.outbox.delivered(delivery)  # removed meanwhile, and with it what to tell
            return
        assert request.webhook is not None, "only a request that wants a webhook has a delivery"
        fault, final = self._post(request, request.webhook.url, delivery)
        if not fault:
            self.outbox.delivered(delivery)
            return
        pause = None if final or delivery.event != "ended" else self._pause(delivery)
        self.outbox.failed(delivery, fault, pause)
        _logger.warning(
            "the webhook %s of %s did not arrive (%s); %s",
            delivery.event, request.id, fault,
            "given up" if pause is None else f"again in {pause:.0f} s",
        )  # fmt: skip

    def _post(self, request: Request, url: str, delivery: Delivery) -> tuple[str, bool]:
        """Post once; what went wrong, empty for nothing, and whether trying again is of no use."""
        body = json.dumps(self._message(request, delivery))
        try:
            status = post(
                url,
                body.encode(),
                self._headers(request, delivery, body),
                allow_private=self.settings.webhook_allow_private,
            )
        except DeliveryRefused as refused:
            return str(refused), True
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"[:_LONGEST_FAULT], False
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            return "", False
        return f"it answered {status}", status == HTTPStatus.GONE

    def _message(self, request: Request, delivery: Delivery) -> dict[str, Any]:
        name = request.status.value if delivery.event == "ended" else delivery.event
        moments = {"started": request.started_at, "ended": request.finished_at}
        moment = moments.get(delivery.event) or self.clock()
        return {
            "type": f"request.{name}",
            "timestamp": datetime.fromtimestamp(moment, UTC).isoformat(),
            "data": REQUEST.dump(ShownRequest(request, self.settings.retention_s)),
        }

    def _headers(self, request: Request, delivery: Delivery, body: str) -> dict[str, str]:
        number = {"ended": "", "started": f"_{request.attempt}", "progress": f"_{request.step}"}
        message_id = f"msg_{request.id}_{delivery.event}{number[delivery.event]}"
        now = datetime.fromtimestamp(int(self.clock()), UTC)
        return {
            "Content-Type": "application/json",
            "User-Agent": "diffusion-replicas",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(
                Signer(secret).sign(message_id, now, body)
                for secret in self.settings.webhook_secret.split()
            ),
        }

    def _pause(self, delivery: Delivery) -> float | None:
        """Seconds to the next try: twice as long each time, and up to half more by chance."""
        pause = min(_FIRST_PAUSE_S * 2 ** (delivery.tries - 1), _LONGEST_PAUSE_S)
        pause *= random.uniform(1.0, 1.5)
        over = self.clock() + pause - delivery.since > _GIVE_UP_S
        return None if over else pause


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
    redis = connect(settings.redis_url)
    return WebhookSender(settings, Records(settings, redis), Outbox(settings, redis))


@app.task(name=DELIVER_TASK)
def deliver() -> int:
    """Send what is due; how many there were."""
    return _sender().send_due()
