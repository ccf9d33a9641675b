"""Webhooks: what is owed, what arrives, what is tried again, and where none may go."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier

from api.webhooks.post import DeliveryRefused, address_fault, post
from api.webhooks.worker import WebhookSender
from configs.settings import Settings
from routing.failover import Sweep
from routing.outbox import Outbox
from tests.integration.api_world import Api, PlayedReplica, body_of, wrong_fields
from tests.integration.receiver import Receiver, receiving
from tests.integration.routing_world import Clock

ApiOpener = Callable[[Settings], Api]
SECRETS = [f"whsec_{base64.b64encode(bytes([n]) * 32).decode()}" for n in (1, 2)]
ALL = ["started", "progress", "ended"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


@pytest.fixture
def api_settings(api_settings: Settings) -> Settings:
    return replace(api_settings, webhook_secret=" ".join(SECRETS), webhook_allow_private=True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sender(api: Api, clock: Clock) -> WebhookSender:
    service = api.service
    outbox = Outbox(service.settings, service.redis, clock)
    return WebhookSender(service.settings, service.records, outbox, clock)


def submitted(api: Api, receiver: Receiver, **more: Any) -> Any:
    return api.submitted(webhook={"url": receiver.url, **more})


def seen(api: Api, request_id: str) -> Any:
    return body_of(api.get(f"/v1/requests/{request_id}"))


def test_the_end_is_told_once_and_signed(
    api: Api, replica: PlayedReplica, receiver: Receiver, sender: WebhookSender
) -> None:
    request = submitted(api, receiver)
    assert request["webhook"] == {
        "url": receiver.url, "events": ["ended"], "tries": 0, "delivered_at": None, "error": None,
    }  # fmt: skip
    assert sender.send_due() == 0
    replica.succeed(replica.claim())
    assert (sender.send_due(), sender.send_due()) == (1, 0)
    (message,) = receiver.messages
    shown = seen(api, request["id"])
    assert message.json["type"] == "request.succeeded"
    assert message.json["data"] == {
        **shown, "webhook": {**shown["webhook"], "delivered_at": None},
    }  # fmt: skip
    assert shown["webhook"]["delivered_at"] is not None
    assert message.headers["webhook-id"] == f"msg_{request['id']}_ended"
    assert len(message.headers["webhook-signature"].split()) == 2


@pytest.mark.parametrize("secret", SECRETS)
def test_the_signature_is_one_that_the_reference_verifies(
    api: Api, replica: PlayedReplica, receiver: Receiver, secret: str
) -> None:
    submitted(api, receiver)
    replica.fail(replica.claim())
    service = api.service
    outbox = Outbox(service.settings, service.redis)
    WebhookSender(service.settings, service.records, outbox).send_due()
    (message,) = receiver.messages
    told = Verifier(secret).verify(message.body, message.headers)
    assert told["type"] == "request.failed"
    assert told["data"]["error"]["code"] == "generation_failed"


def test_start_and_progress_are_told_where_they_are_wanted(
    api: Api,
    replica: PlayedReplica,
    receiver: Receiver,
    sender: WebhookSender,
    clock: Clock,
) -> None:
    submitted(api, receiver, events=ALL)
    request = replica.claim()
    sender.send_due()
    for step in (1, 2, 3):
        api.claims.progress(request, step, 20, 0.1)
    assert sender.outbox.due() == 1
    sender.send_due()
    replica.succeed(request)
    sender.send_due()
    assert receiver.types == ["request.started", "request.progress", "request.succeeded"]
    assert receiver.messages[1].json["data"]["progress"]["step"] == 3


def test_a_start_is_told_though_the_end_came_before_anybody_was_told(
    api: Api, replica: PlayedReplica, receiver: Receiver, sender: WebhookSender
) -> None:
    request = submitted(api, receiver, events=ALL)
    running = replica.claim()
    api.claims.progress(running, 1, 20, 0.1)
    replica.succeed(running)
    assert sender.send_due() == 2
    assert receiver.types == ["request.started", "request.succeeded"]
    assert receiver.messages[0].headers["webhook-id"] == f"msg_{request['id']}_started_1"


def test_what_did_not_arrive_is_tried_again_with_the_same_id_and_longer_pauses(
    api: Api,
    replica: PlayedReplica,
    receiver: Receiver,
    sender: WebhookSender,
    clock: Clock,
) -> None:
    receiver.answers += [500, 302, 503]
    request = submitted(api, receiver)
    replica.succeed(replica.claim())
    for tries, pause in enumerate((5, 10, 20), start=1):
        assert sender.send_due() == 1
        told = seen(api, request["id"])["webhook"]
        assert told["tries"] == tries
        assert told["error"].startswith("it answered")
        clock.forward(pause * 0.99)
        assert sender.send_due() == 0
        clock.forward(pause * 0.52)
    assert sender.send_due() == 1
    told = seen(api, request["id"])["webhook"]
    assert (told["tries"], told["error"]) == (4, None)
    assert told["delivered_at"] is not None
    assert len({message.headers["webhook-id"] for message in receiver.messages}) == 1
    assert len(receiver.messages) == 4, "a redirect was followed"


def test_after_an_hour_it_is_given_up_and_the_record_says_why(
    api: Api, replica: PlayedReplica, receiver: Receiver, sender: WebhookSender, clock: Clock
) -> None:
    receiver.answers += [500] * 100
    request = submitted(api, receiver)
    replica.succeed(replica.claim())
    since = clock.now
    while sender.outbox.due() or clock.now < since + 4000:
        sender.send_due()
        clock.forward(10)
    told = seen(api, request["id"])["webhook"]
    assert told["error"] == "it answered 500"
    assert 10 <= told["tries"] <= 15
    assert told["tries"] == len(receiver.messages)


@pytest.mark.parametrize(("answer", "tries"), [(410, 1), (404, 2)])
def test_who_answers_gone_is_asked_no_more(
    api: Api,
    replica: PlayedReplica,
    receiver: Receiver,
    sender: WebhookSender,
    clock: Clock,
    answer: int,
    tries: int,
) -> None:
    receiver.answers += [answer, answer]
    submitted(api, receiver)
    replica.succeed(replica.claim())
    for _ in range(2):
        sender.send_due()
        clock.forward(8)
    assert len(receiver.messages) == tries


def test_a_sender_that_dies_over_a_message_leaves_it_to_the_next(
    api: Api, replica: PlayedReplica, receiver: Receiver, sender: WebhookSender, clock: Clock
) -> None:
    submitted(api, receiver)
    replica.succeed(replica.claim())
    assert sender.outbox.take() is not None
    assert sender.send_due() == 0
    clock.forward(61)
    assert sender.send_due() == 1
    assert receiver.types == ["request.succeeded"]


def test_a_canceled_an_expired_and_a_removed_request(
    api: Api, replica: PlayedReplica, receiver: Receiver, sender: WebhookSender
) -> None:
    canceled, removed = submitted(api, receiver), submitted(api, receiver)
    api.post(f"/v1/requests/{canceled['id']}/cancel")
    api.delete(f"/v1/requests/{removed['id']}")
    sender.send_due()
    assert receiver.types == ["request.canceled"]
    assert api.service.redis.zcard(api.service.settings.redis_prefix + "deliveries") == 0


def test_a_due_webhook_wakes_the_worker_once_however_many_sweeps_see_it(
    api: Api, replica: PlayedReplica, receiver: Receiver
) -> None:
    submitted(api, receiver)
    replica.succeed(replica.claim())
    service = api.service
    sweep = Sweep(service.settings, service.redis, service.router, service.broker)
    for _ in range(3):
        assert sweep.run()
    assert service.redis.llen(service.settings.redis_prefix + "webhooks") == 1


@pytest.mark.parametrize(
    ("webhook", "param", "words"),
    [
        ({"url": "ftp://example.com/"}, "webhook.url", "http"),
        ({"url": "https://me:pass@example.com/"}, "webhook.url", "name or password"),
        ({"url": "https://exa mple.com/"}, "webhook.url", "space"),
        ({"url": "https://example.com/" + "a" * 2000}, "webhook.url", "2000"),
        ({"url": 5}, "webhook.url", "is not text"),
        ({}, "webhook.url", "is missing"),
        ({"url": "https://example.com", "events": []}, "webhook.events", "is empty"),
        ({"url": "https://example.com", "events": ["done"]}, "webhook.events[0]", "ended"),
        ({"url": "https://example.com", "event": "ended"}, "webhook.event", "did you mean events"),
        ("https://example.com", "webhook", ""),
    ],
)
def test_wrong_webhooks_are_refused_by_name(
    api: Api, replica: PlayedReplica, webhook: Any, param: str, words: str
) -> None:
    wrong = wrong_fields(api.submit(webhook=webhook))
    assert words in wrong[param], wrong


def test_without_a_secret_none_is_served(api_settings: Settings, open_api: ApiOpener) -> None:
    api = open_api(replace(api_settings, webhook_secret=""))
    api.replica().load()
    wrong = wrong_fields(api.submit(webhook={"url": "https://example.com"}))
    assert "WEBHOOK_SECRET" in wrong["webhook"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "127.0.0.1", "10.1.2.3", "192.168.0.9", "172.16.0.1", "169.254.169.254",
        "0.0.0.0", "[::1]", "[fe80::1]", "[fd00::1]", "[::ffff:127.0.0.1]", "100.64.0.1",
        "224.0.0.1", "metadata.google.internal",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(
    api_settings: Settings, open_api: ApiOpener, host: str
) -> None:
    api = open_api(replace(api_settings, webhook_allow_private=False))
    api.replica().load()
    wrong = wrong_fields(api.submit(webhook={"url": f"http://{host}:8080/hook"}))
    assert "is not public" in wrong["webhook.url"]


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0x7f.1", "ip6-localhost."])
def test_a_name_that_resolves_to_a_private_address_is_not_connected_to(
    receiver: Receiver, host: str
) -> None:
    url = receiver.url.replace("127.0.0.1", host)
    assert address_fault(url, allow_private=False) is None
    with pytest.raises((DeliveryRefused, OSError)):
        post(url, b"{}", {}, allow_private=False)
    assert receiver.messages == []


def test_a_public_address_is_none_of_them() -> None:
    assert address_fault("https://1.1.1.1/hook?a=b", allow_private=False) is None
    assert address_fault("https://example.com:8443/hook", allow_private=False) is None
