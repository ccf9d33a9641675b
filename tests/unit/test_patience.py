"""The patience of a call: what is granted, drawn and refused, by a clock that is set by hand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from routing import connection
from routing.broker import Sender
from routing.connection import (
    NameLookup,
    Patience,
    PatientRetry,
    begin_patience,
    end_patience,
    granted,
    renew_patience,
)

END_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def of_this_thread() -> Iterator[None]:
    yield
    end_patience()


def test_operations_that_each_time_out_wait_for_the_patience_in_all() -> None:
    clock = Clock()
    patience = Patience(1.5, clock)
    waited = []
    for _ in range(3):
        with patience.granted(0.6) as seconds:
            clock.now += seconds
            waited.append(round(seconds, 6))
    assert waited == [0.6, 0.6, 0.3]
    with pytest.raises(RedisTimeoutError), patience.granted(0.6):
        pass


def test_what_takes_little_draws_little_and_renewal_gives_all_back() -> None:
    clock = Clock()
    patience = Patience(1.5, clock)
    for _ in range(10):
        with patience.granted(1.0):
            clock.now += 0.1
    assert patience.left_s == pytest.approx(0.5)
    with patience.granted(None) as seconds:
        assert seconds == pytest.approx(0.5)
        clock.now += 5
    assert patience.left_s == 0
    patience.renew()
    assert patience.left_s == 1.5


def test_what_fails_has_waited_too() -> None:
    clock = Clock()
    patience = Patience(1.5, clock)

    def fail() -> None:
        with patience.granted(1.0):
            clock.now += 0.5
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        fail()
    assert patience.left_s == pytest.approx(1.0)


def test_a_thread_has_its_own_and_without_one_the_timeouts_of_its_operations(
    of_this_thread: None,
) -> None:
    begin_patience(0)
    seen: list[float | None] = []

    def other() -> None:
        renew_patience()
        with granted(2.5) as seconds:
            seen.append(seconds)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [2.5]
    with pytest.raises(RedisTimeoutError), granted(2.5):
        pass
    end_patience()
    with granted(2.5) as seconds:
        assert seconds == 2.5


def test_a_wait_within_a_wait_is_drawn_once() -> None:
    clock = Clock()
    patience = Patience(1.0, clock)
    with patience.granted():
        for _ in range(3):  # as a command that connects, and tries again
            with patience.granted():
                clock.now += 0.2
    assert patience.left_s == pytest.approx(0.4)


def test_the_client_library_begins_no_wait_once_the_patience_is_spent(of_this_thread: None) -> None:
    retry, tries = PatientRetry(NoBackoff(), 1, (RedisConnectionError,)), list[int]()

    def ask() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise RedisConnectionError
        return "an answer"

    begin_patience(60)
    assert retry.call_with_retry(ask, lambda _: None) == "an answer"
    begin_patience(0)
    with pytest.raises(RedisTimeoutError):
        retry.call_with_retry(ask, lambda _: None)
    assert len(tries) == 2
    end_patience()
    assert retry.call_with_retry(ask, lambda _: None) == "an answer"


def test_a_lookup_that_hangs_is_given_up_and_shared() -> None:
    answered, asked = threading.Event(), list[str]()

    def ask(host: str, _port: None) -> None:
        asked.append(host)
        assert answered.wait(END_S)

    lookup = NameLookup(ask)
    for _ in range(3):
        with pytest.raises(RedisTimeoutError, match="redis"):
            lookup.wait_for("redis", 0.01)
    assert asked == ["redis"]
    threading.Timer(0.01, answered.set).start()
    lookup.wait_for("redis", END_S)


def test_an_address_needs_no_lookup_and_an_unknown_name_is_known_to_be_none() -> None:
    asked = list[str]()

    def unknown(host: str, _port: None) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    lookup = NameLookup(unknown)
    for address in ("127.0.0.1", "::1"):
        lookup.wait_for(address, 0)
    assert asked == []
    lookup.wait_for("nowhere", END_S)
    assert asked == ["nowhere"]


def test_a_client_whose_name_is_not_found_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(connection, "names", NameLookup(lambda *_: never.wait(END_S)))
    client = connection.connect("redis://redis:6379/0", timeout_s=0.01)
    with pytest.raises(RedisTimeoutError, match="'redis' was not found in time"):
        client.ping()
    never.set()


def test_what_is_handed_over_is_sent_in_order_and_refused_where_too_much_waits() -> None:
    sender, go_on, sent = Sender(), threading.Event(), list[int]()

    def send(number: int) -> bool:
        assert go_on.wait(END_S)
        sent.append(number)
        return True

    promised = [sender.hand_over(lambda n=number: send(n)) for number in range(1100)]  # type: ignore[misc]
    with pytest.raises(TimeoutError):
        promised[0].result(0.01)
    assert [each.result(0) for each in promised if each.done()] == [False] * (1100 - 1001)
    go_on.set()
    assert all(each.result(END_S) for each in promised[:1000])
    assert sent[:1000] == list(range(1000))
    sender.close()


def test_a_sender_outlives_what_cannot_be_sent() -> None:
    sender = Sender()

    def fail() -> bool:
        raise ValueError("it cannot")

    with pytest.raises(ValueError, match="it cannot"):
        sender.hand_over(fail).result(END_S)
    assert sender.hand_over(lambda: True).result(END_S)
    sender.close()
