"""Multipart forms say what JSON says, with files for images."""

from __future__ import annotations

import pytest
from werkzeug.test import encode_multipart

from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.integration.image_inputs import BLUE, MASK, RED, file, send_form
from tests.pictures import data_url, picture


def test_a_form_says_what_json_says(api: Api, editing: PlayedReplica) -> None:
    answer = send_form(
        api,
        image=file(RED),
        mask_image=file(MASK),
        num_inference_steps="7",
        guidance_scale="2.5",
        deterministic="true",
        seed="3",
        output_format="webp",
        metadata='{"who": "me"}',
    )
    assert answer.status_code == 202, answer.json
    request = body_of(answer)
    assert request["task"] == "inpaint"
    wanted = {
        "num_inference_steps": 7,
        "guidance_scale": 2.5,
        "deterministic": True,
        "seed": 3,
        "output_format": "webp",
    }
    assert {name: request["parameters"][name] for name in wanted} == wanted
    assert request["metadata"] == {"who": "me"}


def test_a_form_takes_several_files_and_bracketed_names(api: Api, editing: PlayedReplica) -> None:
    for fields in (
        {"image": [file(RED), file(BLUE)]},
        {"image[]": [file(RED), file(BLUE)]},
    ):
        answer = send_form(api, **fields, **{"metadata[n]": "7"})
        assert answer.status_code == 202, answer.json
        request = body_of(answer)
        assert request["metadata"] == {"n": "7"}
        assert [api.get(url).data for url in request["parameters"]["image"]] == [RED, BLUE]


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "a"), ("num_inference_steps", "1.5"), ("guidance_scale", "NaN"), ("sed", "1")],
)
def test_wrong_form_fields_are_refused_as_in_json(
    api: Api, editing: PlayedReplica, name: str, value: str
) -> None:
    assert set(wrong_fields(send_form(api, **{name: value}))) == {name}


def test_a_name_that_stands_twice_is_malformed(api: Api, editing: PlayedReplica) -> None:
    answer = send_form(api, seed=["1", "2"])
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "seed"
    assert send_form(api, **{"seed[a][b]": "1"}).status_code == 400


def test_a_part_without_a_name_is_malformed(api: Api, editing: PlayedReplica) -> None:
    for header in ("form-data", 'form-data; filename="a.png"'):
        body = f"--x\r\nContent-Disposition: {header}\r\n\r\na\r\n--x--\r\n"
        answer = api.client.post(
            "/v1/requests", data=body, content_type="multipart/form-data; boundary=x"
        )
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "malformed_request"
        assert "not the name of a form field" in error_of(answer)["message"]


def test_an_adapter_in_a_form_is_json(api: Api, editing: PlayedReplica) -> None:
    answer = send_form(api, image=file(BLUE), lora='{"name": "ink", "scale": 2}')
    assert body_of(answer)["parameters"]["lora"] == [{"name": "ink", "scale": 2.0}]


def test_a_large_data_url_fits_into_a_form(api: Api, editing: PlayedReplica) -> None:
    large = picture(64, 64, "jpeg") + b"\0" * 1_000_000
    boundary, body = encode_multipart({"prompt": "a", "image": data_url(large, "image/jpeg")})
    answer = api.client.post(
        "/v1/requests", data=body, content_type=f"multipart/form-data; boundary={boundary}"
    )
    assert answer.status_code == 202, answer.json
