"""The table of GPU checks: what fails, hangs or dies ends nothing but itself."""

import sys

from scripts.lab.gpu_checks.__main__ import (
    Ended,
    Group,
    Row,
    devices_rows,
    engine_rows,
    groups_for,
    pytest_rows,
    run_groups,
    told_rows,
)

SAYS = 'print(\'{"check": "one", "status": "ok", "figure": "3 s", "reason": ""}\', flush=True)'


def group(name: str, script: str, share: float = 1.0) -> Group:
    return Group(name, share, [sys.executable, "-S", "-c", script], told_rows)


def test_each_group_has_its_rows_and_its_time_and_none_ends_another():
    groups = [
        group("good", SAYS),
        group("hangs", f"{SAYS}\nimport time\ntime.sleep(60)", share=0.1),
        group("dies", "import sys\nsys.exit('no such kernel')"),
        group("speaks no rows", "print('hello')"),
        group("last", SAYS, share=40),
    ]
    lines: list[str] = []
    rows = run_groups(groups, 40, lambda row, seconds: lines.append(row.line(seconds)))
    assert [(row.check, row.status) for row in rows] == [
        ("one", "ok"),
        ("one", "ok"),
        ("hangs", "failed"),
        ("dies", "failed"),
        ("speaks no rows", "failed"),
        ("one", "ok"),
    ]
    assert rows[2].reason == "its share of the time is over"
    assert rows[3].reason == "exit code 1: no such kernel"
    assert lines[0].startswith("| one | ok | 3 s |  | ")


def test_what_benchmarks_and_pytest_say_becomes_rows():
    measured = (
        '{"rows": [{"model": "sd3", "n": 4, "seconds": {"serial": 2.5},'
        ' "to_static": {"together": [0.9, 0.8, 1.0]}}]}'
    )
    (row,) = engine_rows(Ended(0, f"| a table |\n{measured}\n", ""))
    assert row == Row("engine_bench sd3, 4 at once", "ok", "serial 2.5 s, together : static 0.9")
    measured = (
        '{"rows": [{"denoiser": "DiT", "rows": 2, "one_ms": 8.0,'
        ' "speedup": {"copies": [1.5, 1, 2]}}]}'
    )
    (row,) = devices_rows(Ended(0, measured, ""))
    assert row.figure == "one 8.0 ms; copies x1.5"
    (row,) = devices_rows(
        Ended(2, "", "usage\nerror: --devices 2 is more than the 1 CUDA devices here")
    )
    assert row.status == "skipped"
    assert pytest_rows(Ended(0, "3 passed in 9 s\n", ""))[0].status == "ok"
    assert pytest_rows(Ended(0, "3 skipped in 9 s\n", ""))[0].status == "skipped"
    assert pytest_rows(Ended(1, "1 failed in 9 s\n", "")) == []


def test_the_groups_name_all_that_is_marked_for_a_gpu():
    for kind in ("cpu", "cuda"):
        tests, *_ = groups_for(kind)
        assert "tests/engine/test_engine_failures.py" in tests.command
