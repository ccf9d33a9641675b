"""Every call of the API ends in time however Redis fails it, and accepts nothing by halves."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from redis import Redis
from werkzeug.test import TestResponse

from configs.redis_url import RedisUrl
from configs.settings import Settings
from routing.connection import API_PATIENCE_S
from tests.integration.api_world import ABILITIES, Api, body_of, error_of
from tests.network import StallingRelay, mute_port, stalling_relay, swallowing_port
from tests.pictures import data_url, picture
from tests.redis_server import free_port
from tests.waiting import answered_within, wait_until

IN_TIME_S = 10.0  # of two dozen calls at once, by a busy machine; one alone has three seconds
AT_ONCE = 24
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
T = TypeVar("T")
Send = Callable[[Api], TestResponse]
# Werkzeug compiles its rules by way of `ast`, in which the threads of CPython 3.11 get mixed up.
_one_api_at_a_time = threading.Lock()


def _api(settings: Settings) -> Api:
    with _one_api_at_a_time:
        return Api(settings)


def _json(path: str, **fields: Any) -> Send:
    return lambda api: api.client.post(path, json=fields)


def _form(path: str, **fields: Any) -> Send:
    def send(api: Api) -> TestResponse:
        data = {**fields, "prompt": PROMPT, "image": (io.BytesIO(RED), "red.png")}
        return api.client.post(path, data=data, content_type="multipart/form-data")

    return send


SUBMITS: dict[str, Send] = {
    "json": _json("/v1/requests", prompt=PROMPT),
    "with all": lambda api: api.client.post(
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
OTHERS: dict[str, Callable[[Api, str], TestResponse]] = {
    "get": lambda api, known: api.get(f"/v1/requests/{known}"),
    "list": lambda api, _: api.get("/v1/requests"),
    "videos": lambda api, _: api.get("/v1/videos"),
    "patch": lambda api, known: api.patch(known, timeout=50),
    "cancel": lambda api, known: api.post(f"/v1/requests/{known}/cancel"),
    "delete": lambda api, known: api.delete(f"/v1/requests/{known}"),
    "events": lambda api, known: api.get(f"/v1/requests/{known}/events"),
    "models": lambda api, _: api.get("/v1/models"),
    "replicas": lambda api, _: api.get("/v1/replicas"),
    "drain": lambda api, _: api.post("/v1/replicas/replica0/drain"),
    "ready": lambda api, _: api.get("/ready"),
    "metrics": lambda api, _: api.get("/metrics"),
}


@dataclass
class Place:
    """An API behind a relay to Redis, in a corner of Redis of its own, with a ready replica."""

    relay: StallingRelay
    api: Api
    direct: Api

    def records(self) -> list[str]:
        """Return the ids of all requests, asked for behind the relay's back."""
        return [each["id"] for each in body_of(self.direct.get("/v1/requests"))["data"]]

    def recorded(self, within: int | None = None) -> bool:
        """Whether the request's record is among the first commands that passed."""
        return any(PROMPT.encode() in command for command in self.relay.commands[:within])

    def answer(self, send: Send) -> TestResponse:
        """Send, and let a call that waits for the request's end go once there is a record."""
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(_in_time, self.api, send)
            wait_until(lambda: sent.done() or self.recorded(), END_S, "the request to be recorded")
            self.api.service.held_calls.close()
            return sent.result(END_S)


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
        direct = _api(own)
        direct.replica().load(ALL)
        api = _api(replace(own, redis_url=f"redis://127.0.0.1:{relay.port}/0"))
        try:
            yield Place(relay, api, direct)
        finally:
            relay.heal()
            api.close()
            direct.close()


def _in_time(api: Api, send: Send) -> TestResponse:
    def answer() -> TestResponse:
        answer = send(api)
        if answer.mimetype == "text/event-stream":
            answer.close()  # in the thread whose context its generator has
        return answer

    return answered_within(IN_TIME_S, answer)


def _all_at_once(case: Callable[..., T], *cases: tuple[Any, ...]) -> list[T]:
    """Cases wait rather than work, and so run side by side."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = [(arguments, pool.submit(case, *arguments)) for arguments in cases]
        results = []
        for arguments, run in begun:
            try:
                results.append(run.result())
            except BaseException as error:
                error.add_note(f"in the case {arguments[:-1]}")
                raise
        return results


def _refused(answer: TestResponse) -> None:
    assert answer.status_code == 503, answer.get_data(as_text=True)
    assert error_of(answer)["code"] == "store_unavailable"
    assert int(answer.headers["Retry-After"]) > 0


@contextmanager
def _refusing_port() -> Iterator[int]:
    yield free_port()


@pytest.mark.parametrize("away", [_refusing_port, mute_port, swallowing_port])
def test_every_call_is_answered_in_time_where_redis_is_away(
    api_settings: Settings,
    redis_client: Redis,
    away: Callable[[], AbstractContextManager[int]],
) -> None:
    others = {name: lambda api, call=call: call(api, "req_1") for name, call in OTHERS.items()}
    calls: dict[str, Send] = {**SUBMITS, **HELD_SUBMITS, **others}
    with away() as port:
        url = f"redis://127.0.0.1:{port}/0"

        def case(_name: str, send: Send) -> None:
            api = _api(replace(api_settings, redis_url=url, webhook_secret=SECRET))
            _refused(_in_time(api, send))
            api.close()

        _all_at_once(case, *calls.items())


def _commands(settings: Settings, name: str, send: Send) -> int:
    """Return how many commands such a call makes."""
    with _place(settings, name) as place:
        answer = place.answer(send)
        assert place.records(), answer.get_data(as_text=True)
        return len(place.relay.commands)


@pytest.mark.parametrize("keep_last", [False, True], ids=["command lost", "answer lost"])
def test_a_submit_in_which_redis_hangs_is_recorded_or_refused(
    api_settings: Settings, redis_client: Redis, keep_last: bool
) -> None:
    """Redis answers some commands of the call and then no more, for each number of them."""

    def case(route: str, answered: int, send: Send) -> bool:
        """Whether it was accepted."""
        with _place(api_settings, f"{route}-{answered}") as place:
            place.relay.stall_after(answered, keep_last=keep_last)
            answer = place.answer(send)
            # Not told by the number alone: the reader of changes sends commands of its own.
            if place.recorded(within=answered):
                ids = place.records()
                assert [body_of(answer)["id"]] == ids if route in SUBMITS else len(ids) == 1
                return True
            _refused(answer)
            place.relay.heal()
            place.api.service.router.withdraw()
            if route == "with all":  # its client finds it by the key, if it was recorded
                again = body_of(_in_time(place.api, send))["id"]
                assert place.records() == [again]
            else:
                assert place.records() == []
            return False

    cases = [
        (route, answered, send)
        for route, send in {**SUBMITS, **HELD_SUBMITS}.items()
        for answered in range(_commands(api_settings, f"{route}-clean", send) + 2)
    ]
    accepted = _all_at_once(case, *cases)
    for route in (*SUBMITS, *HELD_SUBMITS):
        ends = [end for (name, *_), end in zip(cases, accepted, strict=True) if name == route]
        assert set(ends) == {True, False}


def test_any_call_in_which_redis_hangs_is_answered_in_time(
    api_settings: Settings, redis_client: Redis
) -> None:
    def case(
        route: str, answered: int, call: Callable[[Api, str], TestResponse]
    ) -> tuple[str, bool]:
        """Whether Redis hung before the call was done."""
        with _place(api_settings, f"{route}-{answered}") as place:
            known = body_of(place.direct.submit())["id"]
            if answered % 2:
                assert place.direct.replica().load(ALL).claim().id == known
            place.relay.stall_after(answered)
            answer = _in_time(place.api, lambda api: call(api, known))
            if answer.status_code != 503:
                assert answer.status_code < 400, answer.get_data(as_text=True)
            return route, place.relay.stalled

    cases = [(route, number, call) for route, call in OTHERS.items() for number in range(4)]
    hung = _all_at_once(case, *cases)
    assert {route for route, before in hung if before} == set(OTHERS)


def test_answers_that_are_each_in_time_do_not_add_up(
    api_settings: Settings, redis_client: Redis
) -> None:
    """Redis answers each command in less than its timeout, and the call is refused all the same."""

    def case(route: str, send: Send) -> None:
        with _place(api_settings, route) as place:
            place.relay.delay_each(API_PATIENCE_S / 2.5)
            _refused(_in_time(place.api, send))

    _all_at_once(case, *{**SUBMITS, **HELD_SUBMITS}.items())


def test_a_drain_of_many_has_its_patience_for_each_that_moves(
    api_settings: Settings, redis_client: Redis
) -> None:
    """Together they take longer than a call may wait, and each is answered in time."""
    with _place(api_settings, "drain") as place:
        for _ in range(30):
            assert place.direct.submit().status_code == 202
        place.direct.replica("replica1").load(ALL)
        assert place.api.get("/v1/replicas").status_code == 200  # a connection that stands
        place.relay.delay_each(API_PATIENCE_S / 40)
        answer = place.api.post("/v1/replicas/replica0/drain")
        assert answer.status_code == 200, answer.get_data(as_text=True)
        assert body_of(answer)["waiting"] == 0
        assert body_of(place.direct.get("/v1/replicas/replica1"))["waiting"] == 30
