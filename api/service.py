"""The service behind the calls: settings, stages, router and the threads of this process.

One object for each application, which its calls find as `g.service`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from flask import Flask
from redis import Redis

from api.models.catalog import Catalog
from api.requests.waiting import ClientWatch, HeldCalls
from configs.settings import Settings
from configs.stage_config import StageConfig
from configs.stages import load_stages
from routing.broker import Broker
from routing.changes import Changes
from routing.connection import API_ANSWER_S, API_CONNECT_S, connect
from routing.failover import Sweep, Sweeper
from routing.outputs import OutputStore
from routing.records import Records
from routing.replica import Registry
from routing.router import Router

_EXTENSION: Final = "diffusion_service"


@dataclass(frozen=True, slots=True)
class Service:
    """What a call needs, put together once for each process."""

    settings: Settings
    stages: tuple[StageConfig, ...]
    redis: Redis
    records: Records
    registry: Registry
    outputs: OutputStore
    broker: Broker
    router: Router
    catalog: Catalog
    changes: Changes
    held_calls: HeldCalls
    clients: ClientWatch
    sweeper: Sweeper

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Put the parts together; nothing is connected and no thread runs yet.

        Raises:
            ConfigurationError: The stage file is refused.
        """
        stages = load_stages(settings.stage_configs_path)
        redis = connect(settings.redis_url, API_CONNECT_S, API_ANSWER_S)
        records, registry = Records(settings, redis), Registry(settings, redis)
        broker = Broker(settings)
        router = Router(settings, redis, broker)
        # One of its own, that may block: the others give up sooner.
        changes = Changes(settings, connect(settings.redis_url))
        sweep = Sweep(settings, redis, router, broker)
        return cls(
            settings=settings,
            stages=stages,
            redis=redis,
            records=records,
            registry=registry,
            outputs=OutputStore(settings.outputs_url),
            broker=broker,
            router=router,
            catalog=Catalog(stages, registry),
            changes=changes,
            held_calls=HeldCalls(records, changes, settings.max_long_polls),
            clients=ClientWatch(),
            sweeper=Sweeper(sweep, settings.sweep_s, settings.heartbeat_expiry_s),
        )

    def start(self) -> None:
        """Start the threads; each process does so after it was forked."""
        self.changes.start()
        self.clients.start()
        self.sweeper.start()

    def stop(self) -> None:
        """Let the held calls go, end the threads and close the connections."""
        self.held_calls.close()
        self.changes.stop()
        self.clients.stop()
        self.sweeper.stop()
        self.broker.close()
        self.redis.close()


def attach_service(app: Flask, service: Service) -> None:
    """Make `service` the one that the calls of `app` find."""
    app.extensions[_EXTENSION] = service


def service_of(app: Flask) -> Service:
    """Return the service of an application."""
    service: Service = app.extensions[_EXTENSION]
    return service
