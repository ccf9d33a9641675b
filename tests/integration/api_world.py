"""An API over real Redis for the API tests: clients, and replicas played by the true protocol.

A played replica says what a real one says (heartbeats, abilities, claims, progress, outcomes); only
the pipeline is left out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from api.app import create_app
from api.service import Service, service_of
from configs.parameters import Abilities
from configs.settings import Settings
from routing.claims import Claims
from routing.replica import Heartbeat, HeartbeatAnswer, LoadedModel, ReplicaState
from routing.request import Failure, Outcome, Output, Request, Status, Timings

MODEL = "tiny"
STAGE = 0
ABILITIES = Abilities(
    tasks=("text-to-image",),
    size_multiple=8,
    default_width=64,
    default_height=64,
    default_steps=20,
    default_guidance_scale=3.0,
    schedulers=("DDIMScheduler", "EulerDiscreteScheduler"),
    max_prompt_tokens=77,
    loras=("ink", "pixel"),
)
PIXELS = b"\x89PNG\r\n\x1a\nnot a picture, but bytes all the same"
_serial = itertools.count(1)


class PlayedReplica:
    """One replica without a pipeline."""

    def __init__(self, service: Service, name: str = "replica0") -> None:
        self.name = name
        self.service = service
        self.claims = Claims(service.settings, service.redis)
        self.incarnation = f"{next(_serial):08d}"

    def beat(self, state: ReplicaState = ReplicaState.READY, **changes: Any) -> HeartbeatAnswer:
        values: dict[str, Any] = {
            "name": self.name,
            "incarnation": self.incarnation,
            "stage": STAGE,
            "model": MODEL,
            "state": state,
            "node": f"{self.name}@nowhere",
            "host": "nowhere",
            "pid": 1,
            "devices": (0,),
            "device_kind": "cpu",
            "started_at": 1_800_000_000.0,
        }
        return self.service.registry.record(Heartbeat(**{**values, **changes}))

    def load(self, abilities: Abilities = ABILITIES) -> PlayedReplica:
        """Become ready, as a real one does once its pipeline is loaded."""
        self.service.registry.publish_model(LoadedModel(MODEL, STAGE, abilities))
        self.beat()
        return self

    def claim(self) -> Request:
        claim = self.claims.claim(self.name, self.incarnation)
        assert claim is not None, f"nothing waits for {self.name}"
        return claim.request

    def succeed(self, request: Request, data: bytes = PIXELS) -> None:
        """Store the outputs and end the request."""
        outputs = []
        for index, seed in enumerate(request.parameters.seeds()):
            name = f"{request.id}/{request.attempt}-{index}.png"
            self.service.outputs.write(name, data)
            digest = hashlib.sha256(data).hexdigest()
            outputs.append(Output(name, "image/png", 64, 64, seed, len(data), digest))
        timings = Timings(encode_s=0.1, denoise_s=0.5, decode_s=0.1, batch_mean=1.0, store_s=0.2)
        outcome = Outcome(Status.SUCCEEDED, tuple(outputs), timings=timings, step=20, steps=20)
        self._finish(request, outcome)

    def fail(
        self, request: Request, code: str = "generation_failed", *, retryable: bool = False
    ) -> None:
        failure = Failure(code, "The pipeline said no.", retryable)
        self._finish(request, Outcome(Status.FAILED, error=failure))

    def stop(self, request: Request) -> None:
        """End a request that was told to stop."""
        self._finish(request, Outcome(Status.CANCELED))

    def _finish(self, request: Request, outcome: Outcome) -> None:
        self.claims.finish(request, outcome)


class Api:
    """One API process: an application and clients of it.

    Its threads run from `start` on; only calls that wait need them.
    """

    def __init__(self, settings: Settings) -> None:
        self.app: Flask = create_app(settings)
        self.service = service_of(self.app)
        self.claims = Claims(self.service.settings, self.service.redis)

    def start(self) -> Api:
        self.service.start()
        return self

    def close(self) -> None:
        self.service.stop()

    @property
    def client(self) -> FlaskClient:
        return self.app.test_client()

    def replica(self, name: str = "replica0") -> PlayedReplica:
        return PlayedReplica(self.service, name)

    def get(self, path: str, **headers: str) -> TestResponse:
        return self.client.get(path, headers=_names(headers))

    def post(self, path: str, **headers: str) -> TestResponse:
        return self.client.post(path, headers=_names(headers))

    def delete(self, path: str) -> TestResponse:
        return self.client.delete(path)

    def patch(self, request_id: str, **fields: Any) -> TestResponse:
        return self.client.patch(f"/v1/requests/{request_id}", json=fields)

    def submit(self, headers: Mapping[str, str] | None = None, **fields: Any) -> TestResponse:
        body = {"prompt": "a red circle", **fields}
        return self.client.post("/v1/requests", json=body, headers=headers)

    def submitted(self, **fields: Any) -> dict[str, Any]:
        """Submit a request that must be accepted, and return its object."""
        answer = self.submit(**fields)
        assert answer.status_code == 202, answer.json
        return body_of(answer)


def body_of(answer: TestResponse) -> dict[str, Any]:
    body = answer.get_json()
    assert isinstance(body, dict)
    return body


def error_of(answer: TestResponse) -> dict[str, Any]:
    """The error of an answer, which must have the one shape of all errors."""
    assert answer.mimetype == "application/json"
    body = body_of(answer)
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    return error


def wrong_fields(answer: TestResponse) -> dict[str, str]:
    """The wrong fields that a 422 names, with what is wrong with each."""
    assert answer.status_code == 422, answer.get_data(as_text=True)
    return {detail["param"]: detail["message"] for detail in error_of(answer)["details"]}


def _names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
