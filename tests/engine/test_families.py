"""Other families go through the same loader and engine, with no word about them in either."""

from pathlib import Path

import numpy as np
import pytest
import torch

from configs.errors import GenerationFailed
from routing.parameters import Parameters
from tests.engine.conftest import count_decodes, plan
from tests.engine.recorder import Recorder
from tests.engine.tiny_families import FAMILIES, save_family
from workers.abilities import inspect_abilities
from workers.engine import Engine
from workers.observer import Interrupted
from workers.pipeline_loader import load_pipeline

# size multiple, default size, text tokens, true CFG, guidance can change while running
EXPECTED = {
    "stable_diffusion": (2, 32, 24, False, True),
    "stable_diffusion_xl": (2, 32, 24, False, True),
    "stable_diffusion_3": (4, 32, 64, False, True),
    "flux": (4, 256, 64, True, False),
    "pixart": (16, 256, 64, False, False),
}
ASKED = Parameters(
    prompt="a red circle", seed=3, width=48, height=32, num_inference_steps=4, guidance_scale=3.0
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return request.param, save_family(request.param, tmp_path_factory.mktemp(request.param))


def test_a_family_is_loaded_described_run_and_stopped(family: tuple[str, Path]):
    name, folder = family
    pipe = load_pipeline(plan(folder))
    decodes = count_decodes(pipe)
    engine = Engine(pipe, inspect_abilities(pipe, {"num_inference_steps": 2}))
    multiple, size, tokens, true_cfg, steerable = EXPECTED[name]
    abilities = engine.abilities
    assert abilities.size_multiple == multiple
    assert (abilities.default_width, abilities.default_height) == (size, size)
    assert abilities.max_prompt_tokens == tokens
    assert abilities.true_cfg_scale == true_cfg

    recorder = Recorder()
    made = engine.generate(ASKED, recorder)
    assert made.images[0].size == (48, 32)
    assert recorder.calls == [(0, 4), *((step, 4) for step in range(5))]
    assert made.warnings == ()

    for call in (1, 3, 5):
        with pytest.raises(Interrupted):
            engine.generate(ASKED, Recorder(stop_at=call))
    assert len(decodes) == 1

    again = engine.generate(ASKED, Recorder())
    assert again.images[0].tobytes() == made.images[0].tobytes()

    steered = engine.generate(ASKED, Recorder(guidance=9.0))
    assert (steered.warnings == ()) == steerable
    assert (steered.images[0].tobytes() != made.images[0].tobytes()) == steerable


def test_outputs_of_a_family_are_what_their_seeds_make_alone(family: tuple[str, Path]):
    engine = Engine.load(plan(family[1]))
    both = engine.generate(ASKED.with_changes({"num_outputs_per_prompt": 2}), Recorder())
    second = engine.generate(ASKED.with_changes({"seed": 4}), Recorder())
    difference = np.asarray(both.images[1]).astype(int) - np.asarray(second.images[0])
    assert np.abs(difference).max() <= 1


def test_a_scheduler_of_another_kind_is_not_offered(tmp_path: Path):
    flow = Engine.load(plan(save_family("flux", tmp_path)))
    assert flow.abilities.schedulers == ("FlowMatchEulerDiscreteScheduler",)


def test_an_autoencoder_that_a_failing_decode_left_upcast_is_put_back(tmp_path: Path):
    pipe = load_pipeline(plan(save_family("stable_diffusion_xl", tmp_path), dtype="float16"))
    engine = Engine(pipe, inspect_abilities(pipe, {}))
    whole = engine.generate(ASKED, Recorder())
    decode = pipe.vae.decode

    def fail(*_: object, **__: object) -> None:
        assert pipe.vae.dtype == torch.float32
        raise RuntimeError("no decode today")

    pipe.vae.decode = fail
    with pytest.raises(GenerationFailed, match="no decode today"):
        engine.generate(ASKED, Recorder())
    assert pipe.vae.dtype == torch.float16
    pipe.vae.decode = decode
    assert engine.generate(ASKED, Recorder()).images[0].tobytes() == whole.images[0].tobytes()
