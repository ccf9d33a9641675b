"""The pauses between the starts of a part: longer while it keeps failing, short again after."""

from __future__ import annotations

from scripts.launcher.child_process import Backoff


def test_the_pause_doubles_up_to_its_cap():
    backoff = Backoff()

    assert [backoff.pause(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_part_that_was_ready_for_long_begins_anew():
    backoff = Backoff()
    for _ in range(5):
        backoff.pause(0.0)

    assert backoff.pause(60.0) == 1
    assert backoff.pause(59.9) == 2
