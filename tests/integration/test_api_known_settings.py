"""What is known of a model is published with its source, and fills what requests leave out."""

from __future__ import annotations

from dataclasses import replace

from configs.parameters import Abilities
from tests.integration.api_world import ABILITIES, Api, body_of

PAGE = "https://github.com/QwenLM/Qwen-Image"
QWEN = replace(
    ABILITIES,
    guidance_scale=False,
    default_guidance_scale=None,
    true_cfg_scale=True,
    default_true_cfg_scale=4.0,
    default_negative_prompt=" ",
    known_as="Qwen-Image",
    default_sources={"num_inference_steps": PAGE, "true_cfg_scale": PAGE},
    dtypes={"vae": "float32", "transformer": "bfloat16", "text_encoder": "float16"},
    dtype_sources={"default": "rule", "vae": PAGE, "text_encoder": "stage"},
)


def test_each_default_has_its_source(api: Api) -> None:
    api.replica().load(QWEN)
    model = body_of(api.get("/v1/models"))["data"][0]
    assert model["known_as"] == "Qwen-Image"
    assert model["defaults"]["true_cfg_scale"] == 4
    assert model["defaults"]["negative_prompt"] == " "
    assert model["default_sources"].keys() == model["defaults"].keys()
    assert model["default_sources"]["true_cfg_scale"] == PAGE
    assert model["default_sources"]["negative_prompt"] == "pipeline"
    assert model["default_sources"]["width"] == "stage"  # the stage file of these tests says it
    assert model["dtypes"] == QWEN.dtypes
    assert model["dtype_sources"] == {"vae": PAGE, "transformer": "rule", "text_encoder": "stage"}


def test_a_model_that_is_not_known_says_so(api: Api) -> None:
    api.replica().load()
    model = body_of(api.get("/v1/models"))["data"][0]
    assert model["known_as"] is None
    assert "true_cfg_scale" not in model["defaults"]
    assert "negative_prompt" not in model["defaults"]


def test_guidance_that_needs_a_negative_prompt_gets_one(api: Api) -> None:
    replica = api.replica().load(QWEN)
    parameters = api.submitted()["parameters"]
    assert (parameters["true_cfg_scale"], parameters["negative_prompt"]) == (4, " ")
    claimed = replica.claim().parameters
    assert (claimed.true_cfg_scale, claimed.negative_prompt) == (4, " ")
    asked = api.submitted(negative_prompt="blurry", true_cfg_scale=2)["parameters"]
    assert (asked["true_cfg_scale"], asked["negative_prompt"]) == (2, "blurry")


def test_what_an_older_replica_published_is_read_still() -> None:
    old = {
        name: value
        for name, value in QWEN.to_json().items()
        if name not in {"known_as", "default_sources", "default_true_cfg_scale"}
    }
    read = Abilities.from_json(old)
    assert (read.known_as, read.default_sources, read.default_true_cfg_scale) == (None, {}, None)
    assert Abilities.from_json(QWEN.to_json()) == QWEN
