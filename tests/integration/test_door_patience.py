"""Every call of the door ends in time however Redis fails it, and accepts nothing by halves.

What is measured is what a call's thread waits for, not how long the machine took over it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from redis import Redis
from werkzeug.test import TestResponse

from configs.redis_url import RedisUrl
from configs.settings import Settings
from routing.connection import DOOR_PATIENCE_S
from tests.integration.api_world import ABILITIES, Door, body_of, error_of
from tests.network import StallingRelay, mute_port, stalling_relay, swallowing_port
from tests.pictures import data_url, picture
from tests.redis_server import free_port
from tests.waiting import wait_until
from tests.waits import counted_waits

PROMISED_S = 2.0
AT_ONCE = 8
END_S = 60.0
ALL = replace(
    ABILITIES,
    tasks=("text-to-image", "image-to-image", "inpaint", "text-to-video"),
    max_images=2,
    default_frames=9,
    max_frames=81,
    default_fps=8.0,
)
PROMPT = "a red circle that only this test asks for"
RED = picture(48, 32)
WEBHOOK = {"url": "https://example.org/told", "events": ["started", "ended"]}
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
Send = Callable[[Door], TestResponse]


def _json(path: str, **fields: Any) -> Send:
    return lambda door: door.client.post(path, json=fields)


def _form(path: str, **fields: Any) -> Send:
    def send(door: Door) -> TestResponse:
        data = {**fields, "prompt": PROMPT, "image": (io.BytesIO(RED), "red.png")}
        return door.client.post(path, data=data, content_type="multipart/form-data")

    return send


SUBMITS: dict[str, Send] = {
    "json": _json("/v1/requests", prompt=PROMPT),
    "with all": lambda door: door.client.post(
        "/v1/requests",
        json={"prompt": PROMPT, "image": data_url(RED), "webhook": WEBHOOK, "expires_in": 60},
        headers={"Idempotency-Key": "mine"},
    ),
    "form": _form("/v1/requests"),
    "video": _json("/v1/videos", prompt=PROMPT, seconds="2"),
}
# These wait for the end of what they submit.
HELD_SUBMITS: dict[str, Send] = {
    "generations": _json("/v1/images/generations", prompt=PROMPT),
    "edits": _form("/v1/images/edits"),
    "chat": _json("/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}]),
}
OTHERS: dict[str, Callable[[Door, str], TestResponse]] = {
    "get": lambda door, known: door.get(f"/v1/requests/{known}"),
    "list": lambda door, _: door.get("/v1/requests"),
    "videos": lambda door, _: door.get("/v1/videos"),
    "patch": lambda door, known: door.patch(known, timeout=50),
    "cancel": lambda door, known: door.post(f"/v1/requests/{known}/cancel"),
    "delete": lambda door, known: door.delete(f"/v1/requests/{known}"),
    "events": lambda door, known: door.get(f"/v1/requests/{known}/events"),
    "models": lambda door, _: door.get("/v1/models"),
    "replicas": lambda door, _: door.get("/v1/replicas"),
    "drain": lambda door, _: door.post("/v1/replicas/replica0/drain"),
    "ready": lambda door, _: door.get("/ready"),
    "metrics": lambda door, _: door.get("/metrics"),
}


@dataclass
class Place:
    """A door behind a relay to Redis, in a corner of Redis of its own, with a ready replica."""

    settings: Settings
    relay: StallingRelay
    door: Door

    def records(self) -> list[str]:
        """Return the ids of all requests, asked for behind the relay's back."""
        return [each["id"] for each in body_of(self.direct().get("/v1/requests"))["data"]]

    def direct(self) -> Door:
        return Door(self.settings)


@contextmanager
def _place(settings: Settings, name: str) -> Iterator[Place]:
    own = replace(
        settings,
        redis_prefix=f"{settings.redis_prefix}{name}:",
        outputs_url=f"{settings.outputs_url}/{name}",
        webhook_secret=SECRET,
    )
    ((_, port),) = RedisUrl.parse(settings.redis_url).hosts
    with stalling_relay(port) as relay:
        Door(own).replica().load(ALL)
        door = Door(replace(own, redis_url=f"redis://127.0.0.1:{relay.port}/0"))
        try:
            yield Place(own, relay, door)
        finally:
            relay.heal()
            door.close()


def _in_time(door: Door, send: Send) -> TestResponse:
    with counted_waits() as waits:
        answer = send(door)
    assert waits.endless == []
    assert waits.seconds < PROMISED_S, waits.seconds
    return answer


def _refused(answer: TestResponse) -> None:
    assert answer.status_code == 503, answer.get_data(as_text=True)
    assert error_of(answer)["code"] == "store_unavailable"
    assert int(answer.headers["Retry-After"]) > 0


@pytest.fixture
def together() -> Iterator[ThreadPoolExecutor]:
    """Cases wait rather than work, and so run side by side."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield pool


@contextmanager
def _refusing_port() -> Iterator[int]:
    yield free_port()


@pytest.mark.parametrize("away", [_refusing_port, mute_port, swallowing_port])
def test_every_call_is_answered_in_time_where_redis_is_away(
    api_settings: Settings,
    redis_client: Redis,
    together: ThreadPoolExecutor,
    away: Callable[[], AbstractContextManager[int]],
) -> None:
    others = {name: lambda door, call=call: call(door, "req_1") for name, call in OTHERS.items()}
    calls: dict[str, Send] = {**SUBMITS, **HELD_SUBMITS, **others}

    def case(send: Send) -> None:
        url = f"redis://127.0.0.1:{port}/0"
        door = Door(replace(api_settings, redis_url=url, webhook_secret=SECRET))
        _refused(_in_time(door, send))
        door.close()

    with away() as port:
        for done in [together.submit(case, send) for send in calls.values()]:
            done.result(END_S)


def _commands(settings: Settings, name: str, send: Send) -> int:
    """Return how many commands come before the one that records the request, and it."""
    with _place(settings, name) as place, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, place.door)
        wait_until(lambda: sent.done() or place.records(), END_S, "the request to be recorded")
        place.door.service.held_calls.close()
        answer = sent.result(END_S)
        assert place.records(), answer.get_data(as_text=True)
        with_prompt = [PROMPT.encode() in command for command in place.relay.commands]
        return with_prompt.index(True) + 1


@pytest.mark.parametrize("keep_last", [False, True], ids=["command lost", "answer lost"])
@pytest.mark.parametrize("route", [*SUBMITS, *HELD_SUBMITS])
def test_a_submit_in_which_redis_hangs_is_recorded_or_refused(
    api_settings: Settings,
    redis_client: Redis,
    together: ThreadPoolExecutor,
    route: str,
    keep_last: bool,
) -> None:
    """Redis answers some commands of the call and then no more, for each number of them."""
    send = {**SUBMITS, **HELD_SUBMITS}[route]
    recording = _commands(api_settings, "clean", send)

    def case(answered: int) -> None:
        with _place(api_settings, str(answered)) as place:
            place.relay.stall_after(answered, keep_last=keep_last)
            _refused(_in_time(place.door, send))
            place.relay.heal()
            place.door.service.router.withdraw()
            if route == "with all":  # its client finds it by the key, if it was recorded
                again = body_of(_in_time(place.door, send))["id"]
                assert place.records() == [again]
            else:
                assert place.records() == []

    for done in [together.submit(case, answered) for answered in range(recording)]:
        done.result(END_S)
    if route not in SUBMITS:
        return

    def accepted(answered: int) -> None:
        with _place(api_settings, str(answered)) as place:
            place.relay.stall_after(answered, keep_last=keep_last)
            request_id = body_of(_in_time(place.door, send))["id"]
            assert place.records() == [request_id]

    for done in [together.submit(accepted, recording + more) for more in range(3)]:
        done.result(END_S)


@pytest.mark.parametrize("route", OTHERS)
def test_any_call_in_which_redis_hangs_is_answered_in_time(
    api_settings: Settings, redis_client: Redis, together: ThreadPoolExecutor, route: str
) -> None:
    call = OTHERS[route]

    def case(answered: int) -> bool:
        """Whether Redis hung before the call was done."""
        with _place(api_settings, str(answered)) as place:
            known = body_of(place.direct().submit())["id"]
            running = place.direct().replica().load(ALL).claim().id if answered % 2 else known
            assert running == known
            place.relay.stall_after(answered)
            answer = _in_time(place.door, lambda door: call(door, known))
            if answer.status_code != 503:
                assert answer.status_code < 400, answer.get_data(as_text=True)
            return place.relay.stalled

    tried = [together.submit(case, answered) for answered in range(5)]
    hung = [done.result(END_S) for done in tried]
    assert hung[0]


@pytest.mark.parametrize("route", [*SUBMITS, *HELD_SUBMITS])
def test_answers_that_are_each_in_time_do_not_add_up(
    api_settings: Settings, redis_client: Redis, route: str
) -> None:
    """Redis answers each command in less than its timeout, and the call is refused all the same."""
    with _place(api_settings, "slow") as place:
        place.relay.delay_each(DOOR_PATIENCE_S / 2.5)
        _refused(_in_time(place.door, {**SUBMITS, **HELD_SUBMITS}[route]))
