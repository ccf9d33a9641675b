"""Devices, replicas and degrees that do not add up are refused, and what would is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.stage_files import changed, refusal, sole, stage

COMMAS = 'write whole numbers from 0 up with commas between, such as "0,1"'


def test_too_few_or_too_many_devices(tmp_path: Path) -> None:
    error = refusal(tmp_path, changed("runtime.devices", "0,1,2"))
    path, message = sole(error)
    assert path == "stages[0].runtime.devices"
    assert message == (
        "'0,1,2' names 3 devices, and exactly 2 are needed: 2 replicas (runtime.num_replicas) x "
        "1 device each (engine_args.parallel_config.world_size); name 2, or set num_replicas to 3"
    )
    assert error.message.startswith(f"{tmp_path}/stages.yaml is refused: ")


@pytest.mark.parametrize(("replicas", "world_size"), [(1, 1), (4, 1), (2, 2), (1, 3)])
def test_no_other_number_of_devices_will_do(tmp_path: Path, replicas: int, world_size: int) -> None:
    sections: dict[str, Any] = {
        "runtime": {"devices": "0,1", "num_replicas": replicas},
        "engine_args": {"parallel_config": {"world_size": world_size}},
    }
    path, message = sole(refusal(tmp_path, {"stages": [stage(**sections)]}))
    assert path == "stages[0].runtime.devices"
    assert "names 2 devices" in message
    assert f"name {replicas * world_size}" in message


def test_a_number_of_replicas_that_cannot_be_is_not_proposed(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "runtime": {"devices": "0,1,2", "num_replicas": 2},
        "engine_args": {"parallel_config": {"world_size": 2}},
    }
    assert sole(refusal(tmp_path, {"stages": [stage(**sections)]}))[1].endswith("; name 4")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0,0", "'0,0' names device 0 twice; name each device once"),
        ([1, 1], "[1, 1] names device 1 twice; name each device once"),
        ("1,01", "'1,01' names device 1 twice; name each device once"),
        ("0,-1", f"'0,-1' names device -1, which is negative; {COMMAS}"),
        (-1, f"-1 names device -1, which is negative; {COMMAS}"),
        ("0,x", f"'0,x' names device 'x', which is not a whole number; {COMMAS}"),
        ("0-3", f"'0-3' names device '0-3', which is not a whole number; {COMMAS}"),
        ("1.5,0", f"'1.5,0' names device '1.5', which is not a whole number; {COMMAS}"),
        (1.5, f"1.5 names device 1.5, which is not a whole number; {COMMAS}"),
        (True, f"True names device True, which is not a whole number; {COMMAS}"),
        ([0, [1]], f"[0, [1]] names device [1], which is not a whole number; {COMMAS}"),
        ("²,0", f"'²,0' names device '²', which is not a whole number; {COMMAS}"),
        ("0,,1", f"'0,,1' has an empty entry; {COMMAS}"),
        ("", f"'' names no device; {COMMAS}, or leave the key out"),
        ([], f"[] names no device; {COMMAS}, or leave the key out"),
        (
            "0,9999999999",
            f"'0,9999999999' names device 999999999..., which no machine has; {COMMAS}",
        ),
        (
            "cpu",
            (f"'cpu' is a kind of device; write it under engine_args (device: cpu); {COMMAS}"),
        ),
    ],
)
def test_devices_that_are_none(tmp_path: Path, written: object, expected: str) -> None:
    error = refusal(tmp_path, changed("runtime.devices", written))
    assert sole(error) == ("stages[0].runtime.devices", expected)


def test_every_wrong_device_of_a_list_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path, changed("runtime.devices", "0,0,-1,x"))
    assert [detail.param for detail in error.details] == ["stages[0].runtime.devices"] * 3


@pytest.mark.parametrize("written", [0, -1, 1025])
def test_a_number_of_replicas_out_of_range(tmp_path: Path, written: int) -> None:
    assert sole(refusal(tmp_path, changed("runtime.num_replicas", written))) == (
        "stages[0].runtime.num_replicas",
        f"{written} is out of range; give a whole number from 1 to 1024 (replicas)",
    )


@pytest.mark.parametrize("written", ["2", 2.5, 2.0, True, [2]])
def test_a_number_of_replicas_that_is_no_whole_number(tmp_path: Path, written: object) -> None:
    path, message = sole(refusal(tmp_path, changed("runtime.num_replicas", written)))
    assert path == "stages[0].runtime.num_replicas"
    assert message.startswith(f"{written!r} is not a whole number; give a whole number from 1")


@pytest.mark.parametrize(
    ("written", "path", "expected"),
    [
        (
            {"world_size": 4, "ulysses_degree": 2},
            "world_size",
            "4 is not ulysses_degree x ring_degree x cfg_parallel_size, which is 2; make them",
        ),
        (
            {"world_size": 2, "ulysses_degree": 2, "ring_degree": 2},
            "world_size",
            "2 is not ulysses_degree x ring_degree x cfg_parallel_size, which is 4",
        ),
        (
            {"world_size": 6, "cfg_parallel_size": 2, "ulysses_degree": 2},
            "world_size",
            "6 is not ulysses_degree x ring_degree x cfg_parallel_size, which is 4",
        ),
        (
            {"device_map": "balanced", "ring_degree": 2},
            "device_map",
            "'balanced' spreads parts over devices, while ring_degree split each call",
        ),
        ({"device_map": "balanced"}, "device_map", "'balanced' needs several devices"),
    ],
)
def test_a_parallel_config_that_does_not_add_up(
    tmp_path: Path, written: dict[str, object], path: str, expected: str
) -> None:
    document = changed("engine_args.parallel_config", written)
    document["stages"][0]["runtime"] = {}
    found, message = sole(refusal(tmp_path, document))
    assert found == f"stages[0].engine_args.parallel_config.{path}"
    assert expected in message
