"""The shutdown: parts end in their order and in time, with all they started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.settings import REPOSITORY
from tests.integration.parts import DEAF, NOTE_END, RUN, SOON_S, WITH_CHILD, Parts, is_gone, pid_of
from tests.waiting import wait_until


def test_parts_end_in_their_order(parts: Parts):
    members = parts.start_ready(
        parts.part("store", NOTE_END, RUN, stop_order=2),
        parts.part("api", NOTE_END, RUN, stop_order=0),
        parts.part("work", NOTE_END, RUN, stop_order=1),
    )
    pids = [pid_of(member) for member in members]

    parts.stop()

    assert parts.ended() == ["api", "work", "store"]
    assert all(is_gone(pid) for pid in pids)


def test_a_part_that_does_not_end_is_killed_with_all_it_started(parts: Parts):
    part = parts.part("one", DEAF, WITH_CHILD, RUN, grace_s=0.1)
    (member,) = parts.start_ready(part)
    pid, child = pid_of(member), int((parts.folder / "child").read_text())

    parts.stop()

    assert parts.said[-1] == "one did not stop in time and is killed"
    assert is_gone(pid)
    wait_until(lambda: is_gone(child), SOON_S, "its child to be gone")


def test_a_part_with_a_head_start_ends_beside_the_next(parts: Parts):
    note_api = "import glob; os.kill(int(glob.glob('api.[0-9]*')[0].split('.')[1]), 0)"
    end_before_api = NOTE_END.replace("with open", f"{note_api}\n    with open")
    # It ends once the next has, which is long after its head start.
    slow = """
import time
def end(*_):
    while not os.path.exists('ended'): time.sleep(0.01)
    with open('ended', 'a') as file: file.write(name + ' ')
    os._exit(0)
signal.signal(signal.SIGTERM, end)
"""
    parts.start_ready(
        parts.part("api", slow, RUN, stop_order=0, grace_s=SOON_S, head_start_s=0.1),
        parts.part("work", end_before_api, RUN, stop_order=1, grace_s=5.0),
        parts.part("store", NOTE_END, RUN, stop_order=2),
    )
    parts.said.clear()

    parts.stop()

    assert parts.ended() == ["work", "api", "store"]
    assert parts.said == []


def test_a_part_with_a_head_start_is_killed_once_its_own_grace_is_over(parts: Parts):
    api, *_ = parts.start_ready(
        parts.part("api", DEAF, RUN, stop_order=0, grace_s=0.2, head_start_s=0.1),
        parts.part("work", NOTE_END, RUN, stop_order=1, grace_s=5.0),
        parts.part("store", NOTE_END, RUN, stop_order=2),
    )
    pid = pid_of(api)

    parts.stop()

    assert parts.ended() == ["work", "store"]
    assert parts.said[-1] == "api did not stop in time and is killed"
    assert is_gone(pid)


def test_asking_twice_shortens_every_grace(parts: Parts):
    (member,) = parts.start_ready(parts.part("one", DEAF, RUN, grace_s=3600.0))
    pid = pid_of(member)

    parts.stop(hurried=True)

    assert is_gone(pid)


def test_stopping_while_a_part_waits_for_its_next_start_starts_nothing(parts: Parts):
    (member,) = parts.start(parts.part("one", "sys.exit(1)"))
    parts.look_until(lambda: member.process is None, "its end")

    parts.stop()

    assert member.process is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path):
    code = f"""
import os, pathlib, signal, sys
from scripts.launcher.parts import Part
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
