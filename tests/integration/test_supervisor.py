"""The supervisor and the shutdown, with real processes that do nothing but what each test needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from scripts.launcher.part import Part
from scripts.launcher.shutdown import Shutdown
from scripts.launcher.supervisor import Member, Supervisor
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SOON_S = 10.0

RUN = "signal.pause()"
# SIGTERM is not heard.
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
# Notes its name in the file `ended` when it is asked to end.
NOTE_END = """
def end(*_):
    with open('ended', 'a') as file: file.write(name + ' ')
    os._exit(0)
signal.signal(signal.SIGTERM, end)
"""
WITH_CHILD = """
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
open('child', 'w').write(str(child.pid))
"""


class World:
    """A supervisor over a folder of its own, with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.said: list[str] = []
        self.supervisor = Supervisor(
            environment=dict(os.environ),
            folder=folder,
            logs=folder,
            say=self.said.append,
            clock=lambda: self.now,
        )

    def part(self, name: str, *code: str, **options: object) -> Part:
        """A part that runs the code; it is ready once the lines before the last have run."""
        *before, last = code
        lines = [
            "import os, signal, subprocess, sys",
            f"name = {name!r}",
            *before,
            "open(f'{name}.{os.getpid()}', 'w').close()",
            last,
        ]
        mark = self.folder / name
        part = Part(
            name=name,
            command=(sys.executable, "-c", "\n".join(lines)),
            ready=lambda pid: "here" if mark.with_suffix(f".{pid}").exists() else None,
        )
        return replace(part, **options)  # type: ignore[arg-type]

    def start(self, *parts: Part) -> list[Member]:
        self.supervisor.start(parts)
        return self.supervisor.members

    def start_ready(self, *parts: Part) -> list[Member]:
        members = self.start(*parts)
        self.look_until(lambda: all(member.ready for member in members), "the parts to be ready")
        return members

    def look_until(self, condition: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            self.supervisor.look()
            return condition()

        wait_until(look, SOON_S, f"{what}; said: {self.said}")

    def stop(self, hurried: bool = False) -> None:
        Shutdown(lambda: hurried, self.said.append).stop(self.supervisor.members)

    def ended(self) -> list[str]:
        return (self.folder / "ended").read_text().split()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.stop(hurried=True)


def pid_of(member: Member) -> int:
    assert member.process is not None
    return member.process.pid


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_part_that_is_ready_is_said_to_be_so_once(world: World):
    (member,) = world.start_ready(world.part("one", RUN))
    world.supervisor.look()

    assert world.said == [f"one ready: here, up in 0.0 s (pid {pid_of(member)})"]


def test_a_killed_part_starts_again_after_its_pause(world: World):
    (member,) = world.start_ready(world.part("one", RUN))
    first = pid_of(member)

    os.kill(first, signal.SIGKILL)
    world.look_until(lambda: member.process is None, "its end to be seen")
    assert world.said[-1] == "one ended with signal 9 (killed); starting again in 1 s"

    world.now = 0.9
    world.supervisor.look()
    assert member.process is None

    world.now = 1.0
    world.look_until(lambda: member.ready, "it to be back")
    assert pid_of(member) != first


def test_the_pauses_grow_while_it_keeps_failing_and_shrink_after_it_was_stable(world: World):
    (member,) = world.start(world.part("one", "sys.exit(3)"))
    for pause in (1, 2, 4):
        world.look_until(lambda: member.process is None, "its end")
        assert world.said[-1] == f"one ended with code 3; starting again in {pause} s"
        world.now += pause
        world.supervisor.look()
    world.look_until(lambda: member.process is None, "its end")

    member.part = world.part("one", RUN)
    world.now += 8
    world.look_until(lambda: member.ready, "it to be ready")
    world.now += 60
    os.kill(pid_of(member), signal.SIGKILL)
    world.look_until(lambda: member.process is None, "its end")

    assert world.said[-1].endswith("starting again in 1 s")


def test_the_last_line_of_its_log_tells_why_it_ended(world: World):
    code = "sys.exit('\\n  no such folder: x  \\n\\n')"
    (member,) = world.start(world.part("one", code, ready=never))
    world.look_until(lambda: member.process is None, "its end")

    assert world.said == ["one ended with code 1: no such folder: x; starting again in 1 s"]
    assert member.tried


def test_what_the_part_knows_of_its_failure_is_said_rather_than_its_log(world: World):
    part = world.part("one", "sys.exit('a traceback')", failure=lambda _: "no model", ready=never)
    (member,) = world.start(part)
    world.look_until(lambda: member.process is None, "its end")

    assert " ".join(world.said).count("no model") == 1
    assert "traceback" not in " ".join(world.said)
    assert world.said[-1].endswith("starting again in 1 s")


def test_a_failure_is_said_once_while_the_process_lives(world: World):
    part = world.part("one", RUN, failure=lambda _: "no model", ready=never)
    (member,) = world.start(part)
    world.look_until(lambda: member.tried, "the failure")
    world.supervisor.look()

    assert world.said == ["one failed: no model"]


def test_a_program_that_is_not_there_is_tried_again(world: World):
    (member,) = world.start(replace(world.part("one", RUN), command=("/no/such/program",)))

    assert member.process is None
    assert world.said[0].startswith("one cannot be started: ")
    assert world.said[0].endswith("; starting again in 1 s")


def test_its_environment_is_added_and_removed(world: World, monkeypatch: pytest.MonkeyPatch):
    world.supervisor = Supervisor(
        environment={"KEPT": "1", "UNWANTED": "1"},
        folder=world.folder,
        logs=world.folder,
        say=world.said.append,
    )
    code = "assert 'UNWANTED' not in os.environ and os.environ['KEPT'] + os.environ['NEW'] == '12'"
    environment = {"UNWANTED": None, "NEW": "2"}

    world.start_ready(world.part("one", code, RUN, environment=environment))


def test_what_a_dead_part_had_started_is_ended_before_it_starts_again(world: World):
    (member,) = world.start_ready(world.part("one", WITH_CHILD, RUN))
    child = int((world.folder / "child").read_text())

    os.kill(pid_of(member), signal.SIGKILL)
    world.look_until(lambda: member.process is None, "its end")

    wait_until(lambda: is_gone(child), SOON_S, "the child of the dead part to be gone")


def test_parts_end_in_their_order(world: World):
    parts = [
        world.part("store", NOTE_END, RUN, stop_order=2),
        world.part("door", NOTE_END, RUN, stop_order=0),
        world.part("work", NOTE_END, RUN, stop_order=1),
    ]
    members = world.start_ready(*parts)
    pids = [pid_of(member) for member in members]

    world.stop()

    assert world.ended() == ["door", "work", "store"]
    assert all(is_gone(pid) for pid in pids)


def test_a_part_that_does_not_end_is_killed_with_all_it_started(world: World):
    part = world.part("one", DEAF, WITH_CHILD, RUN, grace_s=0.1)
    (member,) = world.start_ready(part)
    pid, child = pid_of(member), int((world.folder / "child").read_text())

    world.stop()

    assert world.said[-1] == "one did not end in time and is killed"
    assert is_gone(pid)
    wait_until(lambda: is_gone(child), SOON_S, "its child to be gone")


def test_a_part_that_lingers_goes_on_until_the_next_have_ended(world: World):
    note_door = "import glob; os.kill(int(glob.glob('door.[0-9]*')[0].split('.')[1]), 0)"
    end_before_door = NOTE_END.replace("with open", f"{note_door}\n    with open")
    parts = [
        world.part("door", DEAF, RUN, stop_order=0, grace_s=0.1, lingers=True),
        world.part("work", end_before_door, RUN, stop_order=1, grace_s=5.0),
        world.part("store", NOTE_END, RUN, stop_order=2),
    ]
    door, *_ = world.start_ready(*parts)
    pid = pid_of(door)

    world.stop()

    assert world.ended() == ["work", "store"]
    assert world.said[-1] == "door did not end in time and is killed"
    assert is_gone(pid)


def test_asking_twice_shortens_every_grace(world: World):
    (member,) = world.start_ready(world.part("one", DEAF, RUN, grace_s=3600.0))
    pid = pid_of(member)

    world.stop(hurried=True)

    assert is_gone(pid)


def test_stopping_while_a_part_waits_for_its_next_start_starts_nothing(world: World):
    (member,) = world.start(world.part("one", "sys.exit(1)"))
    world.look_until(lambda: member.process is None, "its end")

    world.stop()

    assert member.process is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path):
    code = f"""
import os, pathlib, signal, sys
from scripts.launcher.part import Part
from scripts.launcher.supervisor import Supervisor
folder = pathlib.Path({str(tmp_path)!r})
supervisor = Supervisor(environment=dict(os.environ), folder=folder, logs=folder, say=print)
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
supervisor.start([
    Part("killed", (sys.executable, "-c", deaf), lambda pid: None),
    Part("asked", (sys.executable, "-c", "import signal; signal.pause()"), lambda pid: None,
         orphan_signal=signal.SIGTERM),
])
print(*(member.process.pid for member in supervisor.members), flush=True)
signal.pause()
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2
        launcher.kill()

    wait_until(lambda: all(is_gone(pid) for pid in pids), SOON_S, "both processes to be gone")


def never(_pid: int) -> str | None:
    return None
