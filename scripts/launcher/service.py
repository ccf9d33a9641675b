"""The service while it runs: Redis first, then everything else, until a signal asks to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from configs.settings import REPOSITORY, Settings
from configs.stage_config import ReplicaPlan
from routing.broker import Broker
from routing.connection import connect
from routing.replica import Registry
from scripts.api_client import say
from scripts.launcher import parts
from scripts.launcher.preflight import StartRefused, check_names
from scripts.launcher.redis_server import RedisServer, check_redis
from scripts.launcher.run_folder import RunFolder
from scripts.launcher.supervisor import Shutdown, StopSignals, Supervisor, last_line

_LOOK_EVERY_S: Final = 0.2
_REDIS_START_S: Final = 60.0  # it reads its whole file first


def run_service(
    settings: Settings,
    plans: Sequence[ReplicaPlan],
    folder: RunFolder,
    redis: RedisServer | None,
    stop: StopSignals,
) -> None:
    """Run all parts until a signal comes, then stop them; none is left, however it ends.

    Args:
        settings: With the URL of the Redis to use.
        plans: The replicas to run.
        folder: Holds the logs; locked.
        redis: The Redis to start, or None when one was given.
        stop: Says when to stop.

    Raises:
        StartRefused: Redis does not start or answer, or another launcher's replicas have our names.
    """
    supervisor = Supervisor(
        environment={**os.environ, **parts.parts_environment(settings)},
        folder=REPOSITORY,
        logs=folder.logs,
        say=say,
    )
    registry = Registry(settings, connect(settings.redis_url, timeout_s=0.5))
    try:
        if redis is None:
            check_redis(settings.redis_url)
            check_names(registry, plans)
        else:
            _start_redis(supervisor, redis, stop)
        if not stop.has_come():
            workers = [parts.worker_part(plan, settings, registry) for plan in plans]
            others = [parts.api_part(settings), parts.flower_part(settings)]
            if settings.webhook_secret:
                others.append(parts.webhook_part(Broker(settings)))
            supervisor.start([*workers, *others])
            _watch(supervisor, settings, plans, folder, stop)
    finally:
        if stop.has_come():
            say("stopping; press Ctrl-C again to hurry")
        Shutdown(stop.hurry, say).stop(supervisor.members)
    say("stopped; queued requests run after the next start")


def _start_redis(supervisor: Supervisor, redis: RedisServer, stop: StopSignals) -> None:
    supervisor.start([parts.redis_part(redis)])
    (member,) = supervisor.members
    deadline = time.monotonic() + _REDIS_START_S
    while not member.ready and not stop.wait(_LOOK_EVERY_S / 4):
        if member.process is None or member.process.poll() is not None:
            raise StartRefused(
                f"{redis.binary} ended at once: {last_line(member.log)}; more is in {member.log}"
            )
        if time.monotonic() > deadline:
            raise StartRefused(
                f"{redis.binary} did not answer within {_REDIS_START_S:g} s; see {member.log}"
            )
        supervisor.look()


def _watch(
    supervisor: Supervisor,
    settings: Settings,
    plans: Sequence[ReplicaPlan],
    folder: RunFolder,
    stop: StopSignals,
) -> None:
    """Look after the parts; once each has been ready or has failed, say where everything is."""
    announced = False
    while not stop.wait(_LOOK_EVERY_S):
        supervisor.look()
        if not announced and all(member.tried for member in supervisor.members):
            announced = True
            failed = [member.part.name for member in supervisor.members if not member.ready]
            say(_addresses(settings, plans, folder, failed))


def _addresses(
    settings: Settings, plans: Sequence[ReplicaPlan], folder: RunFolder, failed: Sequence[str]
) -> str:
    """Return the block that ends the start: what is served and where, and a call to try."""
    api = parts.base_url(parts.reachable(settings.api_host), settings.api_port)
    flower = parts.base_url("127.0.0.1", settings.flower_port)
    models = ", ".join(dict.fromkeys(plan.stage.model_name for plan in plans))
    count = f"{len(plans)} replica{'' if len(plans) == 1 else 's'}"
    state = f", not ready: {', '.join(failed)}" if failed else ""
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key else ""
    return f"""
Diffusion Replicas: {models} on {count}{state}
  page    {api}/
  API     {api}/v1/requests
  docs    {api}/docs
  Flower  {flower}/
  logs    {folder.logs}

Try it:
  curl -s {api}/v1/requests{key} -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
    -d '{{"prompt": "a large red circle on a blue background"}}'

Ctrl-C stops everything."""
