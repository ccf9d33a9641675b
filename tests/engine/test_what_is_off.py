"""What a stage does not have is not built, and costs its requests nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.errors import LoraLoadFailed
from configs.parameters import Lora
from configs.stage_config import PipelineSettings
from tests.engine.conftest import MakeParameters, plan
from tests.engine.lora_files import save_lora
from tests.engine.recorder import Recorder
from workers.engine.engine import Engine
from workers.engine.features.adapters import Adapters
from workers.engine.features.float32_retry import Float32Retry
from workers.engine.features.prompt_cache import PromptCache
from workers.engine.features.step_cache import StepCache
from workers.engine.loader import load_pipeline


def has(engine: Engine, kind: type) -> bool:
    return any(isinstance(each, kind) for each in engine.features)


def test_one_request_at_a_time_makes_the_bytes_of_one_that_is_alone_among_many(
    engine: Engine, busy_engine: Engine, parameters: MakeParameters
):
    for changes in ({}, {"num_outputs_per_prompt": 2}, {"guidance_scale": 1.0, "width": 48}):
        asked = parameters(**changes)
        made = [each.generate(asked, Recorder()) for each in (engine, busy_engine)]
        pictures = [[image.tobytes() for image in each.images] for each in made]
        assert pictures[0] == pictures[1]


def test_where_one_request_runs_at_a_time_the_denoiser_is_as_it_was(pipe: Any):
    forward = pipe.unet.forward
    engine = Engine(pipe, Engine.load(plan()).abilities)
    assert pipe.unet.forward == forward
    assert engine.requests_waiting == 0
    with pytest.raises(AssertionError, match="one request runs at a time"):
        engine.rendezvous.histogram  # noqa: B018


def test_a_cache_that_keeps_requests_apart_has_nothing_to_share(pipe: Any):
    engine = Engine(
        pipe, Engine.load(plan()).abilities, PipelineSettings(enable_cpu_offload=True), 8
    )
    assert engine.batched_tasks == []
    with pytest.raises(AssertionError, match="one request runs at a time"):
        engine.turns.waiting  # noqa: B018


def test_features_that_are_off_are_not_there(engine: Engine):
    for kind in (Adapters, Float32Retry, StepCache):
        assert not has(engine, kind)
    assert has(engine, PromptCache)
    off = PipelineSettings(enable_prompt_embed_cache=False)
    assert not has(Engine.load(plan(pipeline=off)), PromptCache)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Float32Retry, lambda _: {"dtype": "bfloat16"}),
        (Adapters, lambda folder: {"pipeline": PipelineSettings(lora_dir=str(folder))}),
    ],
)
def test_features_that_are_on_are_there(
    tmp_path: Path, kind: type, options: Callable[[Path], dict[str, Any]]
):
    save_lora(tmp_path / "style.safetensors", {"unet": load_pipeline(plan()).unet}, 1)
    assert has(Engine.load(plan(**options(tmp_path))), kind)


def test_an_adapter_is_refused_where_the_stage_has_none(engine: Engine, parameters: MakeParameters):
    with pytest.raises(LoraLoadFailed, match="no adapter 'style'; this stage has none"):
        engine.generate(parameters(lora=(Lora("style"),)), Recorder())
