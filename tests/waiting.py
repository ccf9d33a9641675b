"""Waiting in tests: for a condition, with a deadline. The only place in tests that may sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_PAUSE_S = 0.02
T = TypeVar("T")


def answered_within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, made in a thread that is left behind where it hangs.

    Raises:
        TimeoutError: It has not returned after ``timeout_s`` seconds.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(timeout_s)


def wait_until(
    condition: Callable[[], T], timeout_s: float, what: str, pause_s: float = _PAUSE_S
) -> T:
    """Ask ``condition`` until it answers something true, and return that.

    Between two questions there are ``pause_s`` seconds; take more where asking costs what is
    waited for its time.

    Raises:
        AssertionError: It did not within ``timeout_s`` seconds; the message says ``what`` was
        awaited and
            what the last answer or error was.
    """
    deadline = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < deadline:
        try:
            answer = condition()
            if answer:
                return answer
            last = answer
        except (OSError, AssertionError, LookupError) as error:
            last = error
        time.sleep(pause_s)
    raise AssertionError(f"waited {timeout_s:g} s in vain for {what}; last seen: {last!r}")
