"""One command: ``python -m scripts.serve [MODEL] --stage-configs-path FILE --port 8099``.

Checks the configuration, then starts Redis (unless ``REDIS_URL`` is set), one worker for each replica,
the API and Flower, says when each is ready, starts again what ends, and stops all of it on Ctrl-C.

Exit codes: 0 stopped when asked to; 1 this machine or network does not have what it takes; 2 the command
line or the configuration is wrong. Does not know HTTP calls, requests or pipelines.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.errors import ConfigurationError
from configs.settings import REPOSITORY, Settings, load_settings
from configs.stages import ReplicaPlan
from routing.connection import connect
from routing.registry import Registry
from scripts import parts
from scripts.console import addresses, complain, say
from scripts.preflight import check_names, check_ports, check_stages, is_loopback
from scripts.redis_server import RedisServer, check_redis, plan_redis
from scripts.refusal import StartRefused
from scripts.run_folder import RunFolder
from scripts.shutdown import Shutdown
from scripts.supervisor import Supervisor, last_line

_LOOK_EVERY_S = 0.1
_REDIS_START_S = 60.0  # it reads its whole file first


class StopWish:
    """What SIGINT, SIGTERM and SIGHUP ask for: to stop; and again: to hurry."""

    def __init__(self) -> None:
        """Take over the signals; one that was ignored (``nohup``) stays ignored."""
        self._event = threading.Event()
        self.times = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def wait(self, seconds: float) -> bool:
        """Wait for it, but not longer; whether it has come."""
        return self._event.wait(seconds)

    def hurried(self) -> bool:
        """Whether it has come more than once."""
        return self.times > 1

    def _note(self, *_: object) -> None:
        self.times += 1
        self._event.set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit code."""
    wish = StopWish()
    try:
        options = _parser().parse_args(arguments)
        settings = _settings(options)
        stages, plans = check_stages(settings, options.model, os.environ)
        folder = RunFolder(settings.run_dir)
        folder.lock()
        check_ports(settings)
        redis = None if os.environ.get("REDIS_URL", "").strip() else plan_redis(folder.redis)
        stage_file = folder.write_stages(settings.stage_configs_path, stages)
        url = redis.url if redis else settings.redis_url
        settings = replace(settings, redis_url=url, stage_configs_path=stage_file)
        folder.turn_logs()
        return _serve(settings, plans, folder, redis, wish)
    except ConfigurationError as refused:
        complain(str(refused))
        return 2
    except StartRefused as refused:
        complain(str(refused))
        return 1


def _serve(
    settings: Settings,
    plans: Sequence[ReplicaPlan],
    folder: RunFolder,
    redis: RedisServer | None,
    wish: StopWish,
) -> int:
    environment = {**os.environ, **parts.parts_environment(settings)}
    supervisor = Supervisor(environment=environment, folder=REPOSITORY, logs=folder.logs, say=say)
    try:
        if redis is None:
            check_redis(settings.redis_url)
        else:
            _start_redis(supervisor, redis, wish)
        registry = Registry(
            connect(settings.redis_url), settings.redis_prefix, settings.heartbeat_expiry_s
        )
        if not wish.times:
            check_names(registry, plans)
            workers = [parts.worker_part(plan, settings, registry) for plan in plans]
            supervisor.start([*workers, parts.api_part(settings), parts.flower_part(settings)])
            _watch(supervisor, settings, plans, folder.logs, wish)
    finally:
        say("stopping")
        Shutdown(wish.hurried, say).stop(supervisor.members)
    say("stopped; what is queued runs after the next start")
    return 0
