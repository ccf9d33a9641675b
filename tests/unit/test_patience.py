"""The patience of a call: what is granted, drawn and refused, by a clock that is set by hand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from routing.broker import Sender
from routing.connection import (
    Address,
    NameLookup,
    Patience,
    PatientSocket,
    begin_patience,
    end_patience,
    granted,
    renew_patience,
)

END_S = 30.0
LOOPBACK: list[Address] = [
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 6379)),
]


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
    with pytest.raises(TimeoutError), patience.granted(0.6):
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
    with granted(0) as seconds:  # a look at what is there already waits for nothing
        assert seconds == 0
    with pytest.raises(TimeoutError), granted(2.5):
        pass
    end_patience()
    with granted(2.5) as seconds:
        assert seconds == 2.5


def test_a_socket_waits_no_longer_than_its_call(of_this_thread: None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        patient = PatientSocket(ours)
        begin_patience(0.01)
        theirs.sendall(b"an answer")
        assert patient.recv(100) == b"an answer"
        with pytest.raises(TimeoutError):
            patient.recv(100)
        theirs.sendall(b"too late")
        with pytest.raises(TimeoutError):
            patient.recv(100)
        with pytest.raises(TimeoutError):
            patient.sendall(b"and nothing more is asked")
        patient.settimeout(0)
        assert patient.recv(100) == b"too late"
        end_patience()
        patient.settimeout(60)
        patient.sendall(b"another call")
        assert theirs.recv(100) == b"another call"
        assert (patient.gettimeout(), patient.fileno()) == (60, ours.fileno())


def test_a_lookup_that_hangs_is_given_up_and_shared() -> None:
    answered, asked = threading.Event(), list[str]()

    def ask(host: str, port: int, family: int) -> list[Address]:
        asked.append(host)
        assert answered.wait(END_S)
        return LOOPBACK

    lookup = NameLookup(ask)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="redis"):
            lookup.addresses("redis", 6379, 0, 0.01)
    assert asked == ["redis"]
    threading.Timer(0.01, answered.set).start()
    assert lookup.addresses("redis", 6379, 0, END_S) == LOOPBACK


def test_an_address_needs_no_lookup_and_an_unknown_name_is_an_error() -> None:
    lookup = NameLookup()
    ((family, _, _, _, address), *_) = lookup.addresses("127.0.0.1", 6379, 0, 0)
    assert (family, address) == (socket.AF_INET, ("127.0.0.1", 6379))
    assert lookup.addresses("localhost", 6379, 0, END_S)

    def unknown(host: str, port: int, family: int) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    with pytest.raises(socket.gaierror):
        NameLookup(unknown).addresses("nowhere", 6379, 0, END_S)


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
