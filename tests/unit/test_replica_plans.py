"""The plan of a host: how replicas are named and dealt devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigurationError
from configs.stage_config import EngineArgs, ParallelConfig, RuntimeConfig, StageConfig
from configs.stages import find_replica, plan_replicas
from tests.unit.stage_files import changed, load, stage


def test_replicas_are_numbered_on_over_stages_and_hosts(tmp_path: Path) -> None:
    document = {
        "stages": [
            stage("org/a", 0, runtime={"devices": "0,1", "num_replicas": 2}),
            stage("org/b", 1, runtime={"devices": "2"}),
        ]
    }
    stages = load(tmp_path, document)
    assert [(plan.name, plan.stage.model_name) for plan in plan_replicas(stages)] == [
        ("replica0", "org/a"),
        ("replica1", "org/a"),
        ("replica2", "org/b"),
    ]
    shifted = plan_replicas(stages, offset=8)
    assert [plan.index for plan in shifted] == [8, 9, 10]
    assert [plan.name for plan in shifted] == ["replica8", "replica9", "replica10"]
    assert [plan.devices for plan in shifted] == [(0,), (1,), (2,)]


def test_a_replica_is_found_by_its_name_or_refused(tmp_path: Path) -> None:
    plans = plan_replicas(load(tmp_path, changed("engine_args.dtype", "auto")), offset=4)
    assert find_replica(plans, "replica5") is plans[1]
    with pytest.raises(ConfigurationError) as refused:
        find_replica(plans, "replica7")
    assert "'replica7' is not a replica of this host's stage file; use replica4 or replica5" in str(
        refused.value
    )
    assert "REPLICA_OFFSET" in str(refused.value)


@st.composite
def planned_stages(draw: st.DrawFn) -> tuple[StageConfig, ...]:
    stages = []
    for stage_id in range(draw(st.integers(1, 4))):
        replicas, each = draw(st.integers(1, 6)), draw(st.integers(1, 4))
        count = replicas * each
        devices = draw(st.lists(st.integers(0, 99), unique=True, min_size=count, max_size=count))
        stages.append(
            StageConfig(
                stage_id=stage_id,
                runtime=RuntimeConfig(devices=tuple(devices), num_replicas=replicas),
                engine_args=EngineArgs("a/b", parallel_config=ParallelConfig(world_size=each)),
            )
        )
    return tuple(stages)


@given(planned_stages(), st.integers(0, 1000))
def test_chunks_are_contiguous_disjoint_and_cover_all(
    stages: tuple[StageConfig, ...], offset: int
) -> None:
    plans = plan_replicas(stages, offset)
    assert [plan.index for plan in plans] == list(range(offset, offset + len(plans)))
    assert all(plan.name == f"replica{plan.index}" for plan in plans)
    for one in stages:
        own = [plan for plan in plans if plan.stage is one]
        assert len(own) == one.runtime.num_replicas
        assert all(len(plan.devices) == one.devices_per_replica for plan in own)
        assert tuple(device for plan in own for device in plan.devices) == one.runtime.devices


@pytest.mark.parametrize(
    ("written", "world_size", "way"),
    [
        ({}, 1, "auto"),
        ({"world_size": 2}, 2, "auto"),
        ({"world_size": 2, "ulysses_degree": 1}, 2, "auto"),
        ({"cfg_parallel_size": 2}, 2, "cfg"),
        ({"ulysses_degree": 2, "ring_degree": 2}, 4, "context"),
        ({"world_size": 2, "ring_degree": 2}, 2, "context"),
        ({"cfg_parallel_size": 2, "ulysses_degree": 2, "ring_degree": 2}, 8, "context"),
        ({"world_size": 2, "device_map": "balanced"}, 2, "device_map"),
    ],
)
def test_devices_of_a_replica_follow_from_the_degrees(
    tmp_path: Path, written: dict[str, Any], world_size: int, way: str
) -> None:
    (only,) = load(tmp_path, {"stages": [stage(engine_args={"parallel_config": written})]})
    parallel = only.engine_args.parallel_config
    assert (parallel.world_size, parallel.way) == (world_size, way)
    assert only.runtime.devices == tuple(range(world_size))
