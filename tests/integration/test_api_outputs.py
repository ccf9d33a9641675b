"""The files of requests over HTTP."""

from __future__ import annotations

import hashlib

from tests.integration.api_world import (
    PIXELS,
    Api,
    PlayedReplica,
    error_of,
)


def test_an_output_is_a_file_that_may_be_kept(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    path = f"/v1/requests/{request_id}/outputs/0"
    early = api.get(path)
    assert early.status_code == 404
    assert "queued" in error_of(early)["message"]
    replica.succeed(replica.claim())
    answer = api.get(path)
    assert answer.status_code == 200
    assert answer.data == PIXELS
    assert answer.mimetype == "image/png"
    assert answer.headers["ETag"] == f'"{hashlib.sha256(PIXELS).hexdigest()}"'
    assert answer.headers["Content-Disposition"] == f'inline; filename="{request_id}-0.png"'
    assert "immutable" in answer.headers["Cache-Control"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    kept = api.get(path, If_None_Match=answer.headers["ETag"])
    assert (kept.status_code, kept.data) == (304, b"")
    assert kept.headers["ETag"] == answer.headers["ETag"]
    assert api.get(path, If_None_Match='"other"').status_code == 200
    missing = api.get(f"/v1/requests/{request_id}/outputs/1")
    assert missing.status_code == 404
    assert error_of(missing)["param"] == "index"


def test_a_file_that_is_gone_is_404(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    replica.succeed(replica.claim())
    api.service.outputs.remove(request_id)
    assert api.get(f"/v1/requests/{request_id}/outputs/0").status_code == 404
