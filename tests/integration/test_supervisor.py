"""The supervisor, with real processes: what is said of them, and when they start again."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from scripts.launcher.supervisor import Supervisor
from tests.integration.parts import RUN, SOON_S, WITH_CHILD, Parts, is_gone, pid_of
from tests.waiting import wait_until


def test_a_part_that_is_ready_is_said_to_be_so_once(parts: Parts):
    (member,) = parts.start_ready(parts.part("one", RUN))
    parts.supervisor.look()

    assert parts.said == [f"one ready: here, up in 0.0 s (pid {pid_of(member)})"]


def test_a_killed_part_starts_again_after_its_pause(parts: Parts):
    (member,) = parts.start_ready(parts.part("one", RUN))
    first = pid_of(member)

    os.kill(first, signal.SIGKILL)
    parts.look_until(lambda: member.process is None, "its end to be seen")
    assert parts.said[-1] == "one ended with signal 9 (killed); starting again in 1 s"

    parts.now = 0.9
    parts.supervisor.look()
    assert member.process is None

    parts.now = 1.0
    parts.look_until(lambda: member.ready, "it to be back")
    assert pid_of(member) != first


def test_the_pauses_grow_while_it_keeps_failing_and_shrink_after_it_was_stable(parts: Parts):
    (member,) = parts.start(parts.part("one", "sys.exit(3)"))
    for pause in (1, 2, 4):
        parts.look_until(lambda: member.process is None, "its end")
        assert parts.said[-1] == f"one ended with code 3; starting again in {pause} s"
        parts.now += pause
        parts.supervisor.look()
    parts.look_until(lambda: member.process is None, "its end")

    member.part = parts.part("one", RUN)
    parts.now += 8
    parts.look_until(lambda: member.ready, "it to be ready")
    parts.now += 60
    os.kill(pid_of(member), signal.SIGKILL)
    parts.look_until(lambda: member.process is None, "its end")

    assert parts.said[-1].endswith("starting again in 1 s")


def test_the_last_line_of_its_log_tells_why_it_ended(parts: Parts):
    code = "sys.exit('\\n  no such folder: x  \\n\\n')"
    (member,) = parts.start(parts.part("one", code, ready=never))
    parts.look_until(lambda: member.process is None, "its end")

    assert parts.said == ["one ended with code 1: no such folder: x; starting again in 1 s"]
    assert member.tried


def test_what_the_part_knows_of_its_failure_is_said_rather_than_its_log(parts: Parts):
    part = parts.part("one", "sys.exit('a traceback')", failure=lambda _: "no model", ready=never)
    (member,) = parts.start(part)
    parts.look_until(lambda: member.process is None, "its end")

    assert " ".join(parts.said).count("no model") == 1
    assert "traceback" not in " ".join(parts.said)
    assert parts.said[-1].endswith("starting again in 1 s")


def test_a_failure_is_said_once_while_the_process_lives(parts: Parts):
    part = parts.part("one", RUN, failure=lambda _: "no model", ready=never)
    (member,) = parts.start(part)
    parts.look_until(lambda: member.tried, "the failure")
    parts.supervisor.look()

    assert parts.said == ["one failed: no model"]


def test_what_would_fail_again_is_said_once_and_not_started_again(parts: Parts):
    exits = frozenset({5})
    (member,) = parts.start(parts.part("one", "sys.exit(5)", ready=never, final_exits=exits))
    parts.look_until(lambda: member.process is None, "its end")
    parts.now += 1000
    parts.supervisor.look()

    assert member.process is None
    assert parts.said == [
        "one ended with code 5; not started again; restart the service once that is fixed"
    ]
    assert member.tried


def test_what_a_part_does_until_it_is_ready_is_said_every_ten_seconds_if_it_changed(parts: Parts):
    doing = ["downloading 1.0 of 2.0 GB"]
    part = parts.part("one", RUN, ready=never, activity=lambda _: doing[0])
    parts.start(part)
    for now in (9, 10, 15, 20, 30):
        parts.now = now
        doing[0] = "loading" if now == 15 else doing[0]
        parts.supervisor.look()

    assert parts.said == ["one: downloading 1.0 of 2.0 GB", "one: loading"]


def test_a_program_that_is_not_there_is_tried_again(parts: Parts):
    (member,) = parts.start(replace(parts.part("one", RUN), command=("/no/such/program",)))

    assert member.process is None
    assert parts.said[0].startswith("one cannot be started: ")
    assert parts.said[0].endswith("; starting again in 1 s")


def test_its_environment_is_added_and_removed(parts: Parts, monkeypatch: pytest.MonkeyPatch):
    parts.supervisor = Supervisor(
        environment={"KEPT": "1", "UNWANTED": "1"},
        folder=parts.folder,
        logs=parts.folder,
        say=parts.said.append,
    )
    code = "assert 'UNWANTED' not in os.environ and os.environ['KEPT'] + os.environ['NEW'] == '12'"
    environment = {"UNWANTED": None, "NEW": "2"}

    parts.start_ready(parts.part("one", code, RUN, environment=environment))


def test_what_a_dead_part_had_started_is_ended_before_it_starts_again(parts: Parts):
    (member,) = parts.start_ready(parts.part("one", WITH_CHILD, RUN))
    child = int((parts.folder / "child").read_text())

    os.kill(pid_of(member), signal.SIGKILL)
    parts.look_until(lambda: member.process is None, "its end")

    wait_until(lambda: is_gone(child), SOON_S, "the child of the dead part to be gone")


def never(_pid: int) -> str | None:
    return None
