"""Celery's sending side: wake-ups to a replica's queue, control commands to its node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, Full, Queue
from typing import Any, Final

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from configs.settings import Settings
from routing.connection import broker_options, granted

_logger = logging.getLogger(__name__)


_MOST: Final = 1000  # that wait to be sent: what is beyond is made good by the heartbeat


_LAST_S: Final = 1.0


_Sending = tuple[Callable[[], bool], Future[bool]]


class Sender:
    """Does what it is handed, in order, in a thread that starts with the first of it."""

    def __init__(self) -> None:
        """Start nothing yet, so that a process may fork."""
        self._unsent: Queue[_Sending | None] = Queue(_MOST)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def hand_over(self, send: Callable[[], bool]) -> Future[bool]:
        """Have ``send`` called; return what it will return, or False where too much waits."""
        promised: Future[bool] = Future()
        try:
            self._unsent.put_nowait((send, promised))
        except Full:
            promised.set_result(False)
        with self._lock:
            # Not alive in a process that was forked from one where it was.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
                self._thread.start()
        return promised

    def close(self) -> None:
        """Give up what waits to be sent, and end once what is being sent is."""
        try:
            while True:
                self._unsent.get_nowait()
        except Empty:
            pass
        self._unsent.put(None)
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _work(self) -> None:
        while (each := self._unsent.get()) is not None:
            send, promised = each
            try:
                promised.set_result(send())
            except Exception as error:
                _logger.exception("something could not be sent")
                promised.set_exception(error)


RUN_TASK: Final = "diffusion.run"


CANCEL_COMMAND: Final = "cancel_request"


UPDATE_COMMAND: Final = "update_request"


HEARTBEAT_COMMAND: Final = "heartbeat_now"


DELIVER_TASK: Final = "diffusion.deliver"


WEBHOOK_QUEUE: Final = "webhooks"


_VISIBILITY_S: Final = 86_400  # longer than any run: a shorter one delivers a running request again


_CONNECT_S: Final = 0.4


_ANSWER_S: Final = 0.6


_AGAIN_S: Final = 0.2


_WAIT_S: Final = 1.0


_LOST = (OperationalError, RedisError, OSError)


def celery_settings(settings: Settings) -> dict[str, Any]:
    """Return the Celery configuration that the API and the replicas share.

    Late acknowledgement with a prefetch of one: a killed worker loses no message, and what it has
    not started stays in the list where it can be counted. No results and no priorities in Celery:
    both live in our records. See docs/architecture.md.
    """
    redis = broker_options(settings.redis_url)
    redis["broker_transport_options"] |= {
        "visibility_timeout": _VISIBILITY_S,
        "global_keyprefix": settings.redis_prefix,
        "priority_steps": [0],
    }
    return {
        **redis,
        "broker_connection_retry_on_startup": True,
        "task_acks_late": True,
        "task_ignore_result": True,
        "worker_prefetch_multiplier": 1,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "task_serializer": "json",
        "accept_content": ["json"],
    }


class Broker:
    """Sends to replicas."""

    def __init__(self, settings: Settings) -> None:
        """Open nothing yet: the first message does."""
        self._sender = Sender()
        self._app = Celery("routing", set_as_current=False)
        self._app.conf.update(celery_settings(settings))
        # Only the sending side may give up early: a worker's blocking reads last longer than this.
        self._app.conf.broker_transport_options |= {
            "socket_connect_timeout": _CONNECT_S,
            "socket_timeout": _ANSWER_S,
            "max_retries": 0,
        }

    def wake(self, replica: str, request_id: str, attempt: int) -> bool:
        """Send one wake-up to a replica's queue; False where the broker did not take it.

        The id and attempt are there for whoever reads logs or Flower.
        """
        return self._sent(
            f"wake-up of {replica}",
            self._app.send_task,
            RUN_TASK,
            args=(request_id, attempt),
            queue=replica,
            retry=False,
        )

    def wake_webhooks(self) -> bool:
        """Wake the worker of the webhooks; False where the broker did not take it."""
        return self._sent(
            "wake-up of the webhooks", self._app.send_task, DELIVER_TASK, queue=WEBHOOK_QUEUE
        )

    def cancel(self, node: str, request_id: str, attempt: int) -> bool:
        """Tell a replica at once that a request of its was canceled; the record says so already."""
        return self._command(node, CANCEL_COMMAND, request_id=request_id, attempt=attempt)

    def update(self, node: str, request_id: str, attempt: int) -> bool:
        """Tell a replica at once that a request of its was edited; the record says how."""
        return self._command(node, UPDATE_COMMAND, request_id=request_id, attempt=attempt)

    def ask_heartbeat(self, node: str) -> bool:
        """Ask a replica for a heartbeat now, so that a drain or resume shows at once."""
        return self._command(node, HEARTBEAT_COMMAND)

    def answers(self, node: str, timeout_s: float = 0.3) -> bool:
        """Whether a Celery worker of that name answers now."""
        try:
            return bool(self._app.control.ping(destination=[node], timeout=timeout_s))
        except _LOST:
            return False

    def close(self) -> None:
        """End the sending and close the connections."""
        self._sender.close()
        self._app.close()

    def _command(self, node: str, command: str, **arguments: Any) -> bool:
        return self._sent(
            f"{command} to {node}",
            self._app.control.broadcast,
            command,
            arguments=arguments,
            destination=[node],
        )

    def _sent(self, what: str, send: Callable[..., object], *args: Any, **options: Any) -> bool:
        """Whether it was sent by now; where it was not it still is, once the broker lets it."""
        promised = self._sender.hand_over(partial(_sent_in_two, what, send, *args, **options))
        try:
            with granted(_WAIT_S) as seconds:
                return promised.result(seconds)
        except (TimeoutError, RedisTimeoutError):
            _logger.warning("%s is not sent yet: the broker does not answer", what)
            return False


def _sent_in_two(what: str, send: Callable[..., object], *args: Any, **options: Any) -> bool:
    # Celery's first command after a Redis restart meets a dead connection (seen in 5 of 6
    # restarts), so it is sent a second time before it counts as lost; not where Redis does not
    # answer, since others wait to be sent.
    started = time.monotonic()
    for last in (False, True):
        try:
            send(*args, **options)
        except _LOST as error:
            if last or time.monotonic() - started > _AGAIN_S:
                _logger.warning("%s was not sent: %s", what, error)
                return False
        else:
            return True
    return False
