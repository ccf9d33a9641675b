"""Metrics for Prometheus, read from the registry at each scrape.

All numbers come from Redis, so each API process gives the same answer and none keeps counters of
its own. docs/operations.md says what each number means for an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flask import Blueprint, Response, g
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from routing.replica import Replica, ReplicaState

blueprint = Blueprint("metrics", __name__)
_LABELS = ("replica", "model")
_Reader = Callable[[Replica], float | None]


@blueprint.get("/metrics")
def metrics() -> Response:
    """Answer a scrape."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(g.service.registry.all()))
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


class ReplicaCollector(Collector):
    """Metrics of replicas as they stood when they were read."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """Show `replicas`."""
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each number."""
        yield self._states()
        yield self._finished()
        yield self._gauge("waiting_requests", "Requests in the queue of a replica.", _waiting)
        yield self._gauge("running_requests", "Requests a replica runs.", _running)
        yield self._gauge("step_seconds", "Seconds of a denoising step, moving mean.", _step_s)
        yield self._gauge("memory_bytes", "Memory of the process.", _memory)
        yield self._gauge("device_memory_bytes", "Device memory of the process.", _device_memory)
        yield self._gauge(
            "last_heartbeat_timestamp_seconds",
            "When the replica last said it lives.",
            _heartbeat_at,
        )
        restarts = CounterMetricFamily(
            "diffusion_replica_restarts", "Starts after the first.", labels=_LABELS
        )
        for replica in self._replicas:
            restarts.add_metric(_labels(replica), replica.restarts)
        yield restarts

    def _states(self) -> Metric:
        family = GaugeMetricFamily(
            "diffusion_replica_state", "1 for the state it is in.", labels=(*_LABELS, "state")
        )
        for replica in self._replicas:
            for state in ReplicaState:
                is_in = float(replica.state is state)
                family.add_metric((*_labels(replica), state.value), is_in)
        return family

    def _finished(self) -> Metric:
        family = CounterMetricFamily(
            "diffusion_requests_finished",
            "Requests that a replica has ended.",
            labels=(*_LABELS, "status"),
        )
        for replica in self._replicas:
            family.add_metric((*_labels(replica), "succeeded"), replica.completed)
            family.add_metric((*_labels(replica), "failed"), replica.failed)
        return family

    def _gauge(self, name: str, help_text: str, read: _Reader) -> Metric:
        family = GaugeMetricFamily(f"diffusion_replica_{name}", help_text, labels=_LABELS)
        for replica in self._replicas:
            value = read(replica)
            if value is not None:
                family.add_metric(_labels(replica), value)
        return family


def _labels(replica: Replica) -> tuple[str, str]:
    return (replica.name, replica.heartbeat.model)


def _waiting(replica: Replica) -> float:
    return replica.waiting


def _running(replica: Replica) -> float:
    return replica.running


def _step_s(replica: Replica) -> float | None:
    return replica.heartbeat.step_s


def _memory(replica: Replica) -> float | None:
    return replica.heartbeat.memory_bytes


def _device_memory(replica: Replica) -> float | None:
    return replica.heartbeat.device_memory_bytes


def _heartbeat_at(replica: Replica) -> float:
    return replica.heartbeat_at
