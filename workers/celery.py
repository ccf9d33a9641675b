"""The Celery app: ``celery -A workers worker -Q replica0``, that line alone, is a replica.

The queue's name says which replica; the stage file says which devices and which model. Pool, width
and node name are set here, so that the bare command line is right. Importing this module reads the
environment and opens nothing: Flower imports it too.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from celery import Celery
from celery.signals import (
    celeryd_after_setup,
    celeryd_init,
    worker_init,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)

from configs.devices import check_machine, device_environment, pin_to_cores, with_device
from configs.errors import EXIT_LASTING, ConfigurationError, GenerationError, ModelLoadFailed
from configs.machine import detect_machine
from configs.settings import Settings, load_settings
from configs.stage_config import ReplicaPlan, StageConfig
from configs.stages import find_replica, load_stages, plan_replicas
from routing.broker import celery_settings
from workers.replica import ReplicaProcess, become, current

_logger = logging.getLogger(__name__)
_QUEUE = re.compile(r"replica\d+")
_EXIT_FAULT = 1
_EXIT_CONFIGURATION = 2
_EXIT_MODEL = 3


def make_app(settings: Settings) -> Celery:
    """Make the app; concurrency follows from the stage once the queue is known."""
    made = Celery("workers", include=["workers.task"])
    made.conf.update(
        celery_settings(settings),
        worker_pool="threads",
        worker_concurrency=1,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=True,
    )
    return made


def _end_on_error(handler: Callable[..., None]) -> Callable[..., None]:
    """End the process when a handler fails: Celery would log it and go on with half a replica."""

    @functools.wraps(handler)
    def checked(**arguments: Any) -> None:
        try:
            handler(**arguments)
        except Exception as error:
            _logger.exception("the replica cannot go on")
            _give_up(f"{handler.__name__}: {type(error).__name__}: {error}", _EXIT_FAULT)

    return checked


try:
    app = make_app(load_settings())
except ConfigurationError as refused:
    sys.exit(f"Error: {refused}")


@celeryd_init.connect(weak=False)
@_end_on_error
def become_replica(instance: Any, options: dict[str, Any], **_: Any) -> None:
    """Find out which replica this process is, and take its devices before torch is imported."""
    settings = load_settings()
    for room in ("workers", "routing", "configs"):
        # Celery's own would write two lines for each wake-up at this level.
        logging.getLogger(room).setLevel(settings.log_level)
    try:
        stages = load_stages(settings.stage_configs_path)
        plan = _plan(settings, stages, options.get("queues"))
        machine = detect_machine(os.environ, cpu_devices=settings.cpu_devices)
        check_machine(stages, machine)
    except ConfigurationError as refused:
        _give_up(str(refused), _EXIT_CONFIGURATION)
    os.environ.update(device_environment(plan, machine, os.environ))
    pin_to_cores(plan, machine)
    replica = become(ReplicaProcess(with_device(plan, machine), settings, machine))
    instance.hostname = replica.node
    # Now, before torch is imported: what is registered first is called last.
    atexit.register(_leave)


@worker_init.connect(weak=False)
@_end_on_error
def set_up_worker(sender: Any, **_: Any) -> None:
    """Take as many requests at a time as the stage says, and do not look for other workers.

    Here and not by the app's configuration: the command line has read that already, and passes it
    on as if it had been typed. Workers that look for each other take a second longer to start and
    hear all of each other's events; what they would agree on, revoked tasks and clocks, is not
    used.
    """
    sender.concurrency = current().plan.stage.engine_args.max_num_seqs
    sender.options |= {"without_mingle": True, "without_gossip": True}


@celeryd_after_setup.connect(weak=False)
@_end_on_error
def load_model(**_: Any) -> None:
    """Load the pipeline before the first message can arrive."""
    try:
        current().load()
    except GenerationError as failed:
        sys.stderr.write(f"Error: {current().plan.name}: {failed}\n")
        lasting = isinstance(failed, ModelLoadFailed) and failed.lasting
        # At once: a thread may still wait for a rank that is gone, and Python would wait for it.
        _end_now(EXIT_LASTING if lasting else _EXIT_MODEL)


@worker_ready.connect(weak=False)
@_end_on_error
def join_rotation(**_: Any) -> None:
    """Requests are taken from now on."""
    current().open()


@worker_shutting_down.connect
def leave_rotation(**_: Any) -> None:
    """After SIGTERM nothing more is taken; what runs gets ``DRAIN_S``."""
    current().stop()


@worker_shutdown.connect
def end(sender: Any, **_: Any) -> None:
    current().close(sender.exitcode or 0)


def _plan(settings: Settings, stages: tuple[StageConfig, ...], queues: object) -> ReplicaPlan:
    names = queues.split(",") if isinstance(queues, str) else list(queues or ())  # type: ignore[call-overload]
    if len(names) != 1 or not _QUEUE.fullmatch(str(names[0])):
        raise ConfigurationError(
            f"-Q {','.join(map(str, names)) or '(nothing)'} does not name one replica; start each "
            "replica with a worker of its own: celery -A workers worker -Q replica0"
        )
    return find_replica(plan_replicas(stages, settings.replica_offset), names[0])


def _leave() -> None:
    """End a replica that has told the registry so, without torch taking itself down.

    That is seconds of work for nothing, in which a supervisor may lose its patience.
    """
    if (code := current().exit_code) is not None:
        _end_now(code)


def _end_now(code: int) -> NoReturn:
    for child in multiprocessing.active_children():
        child.terminate()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _give_up(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"Error: {message}\n")
    sys.stderr.flush()
    raise SystemExit(code)
