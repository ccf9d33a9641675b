"""Sends the webhooks that are due: signed after Standard Webhooks, again and again for an hour.

One message has one id, however often it is sent, and may arrive twice. What came of the last one of
a request stands in its record. Does not know Celery, which calls it.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from standardwebhooks import Webhook as Signer

from api.presentation import request_object
from api.webhook_post import Refused, post
from configs.errors import NotFound
from configs.settings import Settings
from routing.record import Request
from routing.request_store import RequestStore
from routing.webhooks import Deliveries, Delivery

_GIVE_UP_S: Final = 3600.0
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 600.0
_LONGEST_FAULT: Final = 200
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WebhookSender:
    """Sends for one service."""

    settings: Settings
    store: RequestStore
    deliveries: Deliveries
    clock: Callable[[], float] = time.time

    def send_due(self) -> int:
        """Send what is due and return how many there were.

        Raises:
            redis.RedisError: Redis did not answer; what was taken is due again in a minute.
        """
        sent = 0
        while (delivery := self.deliveries.take()) is not None:
            self._send(delivery)
            sent += 1
        return sent

    def _send(self, delivery: Delivery) -> None:
        try:
            request = self.store.get(delivery.request_id)
        except NotFound:
            self.deliveries.delivered(delivery)  # removed meanwhile, and with it what to tell
            return
        assert request.webhook is not None, "only a request that wants a webhook owes one"
        fault, final = self._post(request, request.webhook.url, delivery)
        if not fault:
            self.deliveries.delivered(delivery)
            return
        pause = None if final or delivery.event != "ended" else self._pause(delivery)
        self.deliveries.failed(delivery, fault, pause)
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
        except Refused as refused:
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
            "data": request_object(request, None, self.settings.retention_s),
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
