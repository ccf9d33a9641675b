"""Gunicorn's configuration: `gunicorn --config python:api.server` runs the API.

A configuration file, and so the one module of this package that reads the settings when it is
loaded.
"""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

from api.service import service_of
from configs.settings import load_settings

_settings = load_settings()


wsgi_app = "api.app:create_app()"


_host = f"[{_settings.api_host}]" if ":" in _settings.api_host else _settings.api_host


bind = f"{_host}:{_settings.api_port}"


workers = _settings.api_workers


worker_class = "gthread"


threads = _settings.api_threads


# Connections beyond the threads are the idle ones that clients keep open.
worker_connections = 4 * threads


# Held calls answer at once when a worker is told to stop, so that this is seldom reached.
graceful_timeout = 8


keepalive = 5


loglevel = _settings.log_level.lower()


control_socket_disable = True


proc_name = "diffusion-api"


def post_worker_init(worker: Any) -> None:
    """Start this process's threads; they would not have outlived the fork."""
    logging.basicConfig(
        level=_settings.log_level,
        format="%(asctime)s %(levelname)s api[%(process)d] %(name)s: %(message)s",
    )
    service = service_of(worker.app.callable)
    service.start()
    stop = signal.getsignal(signal.SIGTERM)

    def stop_at_once(number: int, frame: FrameType | None) -> None:
        """Let the held calls go first: they would keep the worker for as long as they may wait."""
        service.held_calls.close()
        if callable(stop):
            stop(number, frame)

    signal.signal(signal.SIGTERM, stop_at_once)


def worker_exit(_server: Any, worker: Any) -> None:
    """End this process's threads; a worker that never got as far as the application has none."""
    app = getattr(worker.app, "callable", None)
    if app is not None:
        service_of(app).stop()
