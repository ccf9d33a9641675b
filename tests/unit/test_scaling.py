"""The sweep without a service: its plan, and the speed-up and efficiency of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from configs.stages import load_stages
from scripts.launcher.preflight import StartRefused
from scripts.serving_bench.scaling import draw, plan_sweep, scaling, scaling_table
from tests.unit.stage_files import stage


def run(replicas: int, number: int, rate: float, failed: int = 0) -> dict[str, Any]:
    found = {
        "throughput_qps": rate,
        "failed_requests": failed,
        "run_time": {"mean": 0.5},
        **{f"latency_{name}": 10 / replicas for name in ("p50", "p95", "p99")},
    }
    return {"replicas": replicas, "round": number, "figures": found}


def test_ratios_are_taken_inside_a_round() -> None:
    # In the second round the machine was half as fast for both.
    runs = [run(1, 1, 2.0), run(2, 1, 3.8), run(1, 2, 1.0), run(2, 2, 1.9), run(4, 1, 4.0, 1)]
    one, two, four = scaling(runs)
    assert (one.speedup, one.efficiency) == (1.0, 1.0)
    assert (two.speedup, two.efficiency) == (1.9, 0.95)
    assert (two.lowest, two.highest, two.ideal) == (1.9, 3.8, 3.0)
    assert (four.speedup, four.efficiency, four.failed) == (2.0, 0.5, 1)


def test_the_smallest_count_need_not_be_one() -> None:
    two, four = scaling([run(2, 1, 3.0), run(4, 1, 6.0)])
    assert (two.efficiency, four.efficiency, four.speedup, four.ideal) == (1.0, 1.0, 2.0, 6.0)


def test_where_all_failed_nothing_is_divided_by_zero(tmp_path: Path) -> None:
    rows = scaling([run(1, 1, 0.0, 3), run(2, 1, 0.0, 3)])
    assert [row.efficiency for row in rows] == [0.0, 0.0]
    assert scaling_table(rows).count("\n") == 3
    draw(rows, "none", tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.format == "PNG"


def written(folder: Path, document: Any) -> Path:
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def cpu_stage(number: int, devices: str | None, **engine_args: Any) -> dict[str, Any]:
    entry = stage(f"org/model{number}", number, engine_args={"device": "cpu", **engine_args})
    return {**entry, "runtime": {"devices": devices} if devices else {}}


def test_a_file_differs_from_the_given_one_in_replicas_and_devices_only(tmp_path: Path) -> None:
    given = written(tmp_path, {"stages": [cpu_stage(0, "0")]})
    plan = plan_sweep(given, [1], {})
    (before,) = load_stages(given)
    (after,) = load_stages(plan.write(1, tmp_path))
    assert after.runtime == before.runtime
    assert after.model_name == before.model_name == "org/model0"
    assert after.engine_args.device == "cpu"


def test_one_stage_of_several_is_picked_by_its_id(tmp_path: Path) -> None:
    given = written(tmp_path, {"stages": [cpu_stage(0, "0"), cpu_stage(1, "0")]})
    assert plan_sweep(given, [1], {}, stage_id=1).stage.model_name == "org/model1"
    with pytest.raises(StartRefused, match="has several stages; choose one with --stage-id: 0, 1"):
        plan_sweep(given, [1], {})


def test_replicas_of_several_devices_need_as_many(tmp_path: Path) -> None:
    given = written(
        tmp_path, {"stages": [cpu_stage(0, None, parallel_config={"cfg_parallel_size": 1})]}
    )
    with pytest.raises(StartRefused) as refused:
        plan_sweep(given, [1, 5000], {})
    assert "5000 replicas need 5000 devices (1 each), but this machine has " in str(refused.value)
    assert "; use --replicas up to " in str(refused.value)


def test_a_deploy_file_is_swept_too(tmp_path: Path) -> None:
    given = written(
        tmp_path,
        {"pipeline": "x", "stages": [{"stage_id": 0, "devices": "0", "device": "cpu"}]},
    )
    plan = plan_sweep(given, [1], {}, model="org/given")
    (found,) = load_stages(plan.write(1, tmp_path))
    assert found.model_name == "org/given"
