"""Caches between steps: each request begins with an empty one; what a family lacks is refused."""

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ModelLoadFailed
from configs.stage_config import CACHE_BACKENDS, PipelineSettings
from tests.engine.conftest import BUNDLED, MakeParameters, plan
from tests.engine.living_tensors import growth
from tests.engine.recorder import Recorder
from tests.engine.tiny_families import save_family
from workers.engine.engine import Engine
from workers.engine.progress import Interrupted

OPTIONS: dict[str, dict[str, Any]] = {
    "first_block_cache": {"threshold": 0.5},
    "taylorseer_cache": {"cache_interval": 3, "taylor_factors_dtype": "float32"},
    "mag_cache": {"mag_ratios": [1.0] * 28, "max_skip_steps": 2},
    "faster_cache": {"spatial_attention_timestep_skip_range": [-1, 1000]},
    "pyramid_attention_broadcast": {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": [0, 1000],
    },
}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("flux", tmp_path_factory.mktemp("flux"))


def cached(folder: Path, backend: str | None, **options: Any) -> Engine:
    settings = PipelineSettings(cache_backend=backend, cache_config=options)
    small = {"width": 32, "height": 32, "num_inference_steps": 8}
    return Engine.load(plan(folder, small, pipeline=settings))


def made(engine: Engine, parameters: Any) -> bytes:
    return engine.generate(parameters, Recorder()).images[0].tobytes()


def block_calls(engine: Engine) -> list[int]:
    """Return a list that grows with every run of the last part that a cache may skip."""
    calls: list[int] = []
    block = engine.pipe.transformer.single_transformer_blocks[-1].attn.to_q
    block.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.fixture(scope="module", params=CACHE_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(backend: str, flux: Path) -> Engine:
    return cached(flux, backend, **OPTIONS[backend])


def test_requests_in_sequence_equal_their_solo_runs(
    flux: Path, backend: str, engine: Engine, parameters: MakeParameters
):
    """The cache works, and what one request left in it, interrupted too, is gone for the next."""
    first = parameters(num_inference_steps=8)
    second = parameters(num_inference_steps=5, seed=7, prompt="a blue star")
    calls = block_calls(engine)
    alone = made(engine, first)
    assert 0 < len(calls) < 8
    with pytest.raises(Interrupted):
        engine.generate(first, Recorder(stop_at=4))
    assert made(engine, second) == made(cached(flux, backend, **OPTIONS[backend]), second)
    assert made(engine, first) == alone


def test_a_run_leaves_no_tensors_in_the_cache(flux: Path, parameters: MakeParameters):
    engines = cached(flux, "first_block_cache", threshold=0.5), cached(flux, None)
    with_cache, without = (
        growth(lambda engine=engine: made(engine, parameters()))  # type: ignore[misc]
        for engine in engines
    )
    assert with_cache == without


@pytest.mark.parametrize(
    ("backend", "options", "says"),
    [
        (
            "first_block_cache",
            {"treshold": 1},
            "cache_config.treshold is not an option of first_block_cache; use threshold",
        ),
        ("mag_cache", {}, "cache_config.mag_ratios is missing"),
        (
            "pyramid_attention_broadcast",
            {"current_timestep_callback": "x"},
            "current_timestep_callback is not an option of pyramid_attention_broadcast",
        ),
    ],
)
def test_wrong_options_are_refused(flux: Path, backend: str, options: dict[str, Any], says: str):
    with pytest.raises(ModelLoadFailed) as caught:
        cached(flux, backend, **options)
    assert says in caught.value.message


@pytest.mark.parametrize("backend", CACHE_BACKENDS)
def test_a_unet_has_no_caches(backend: str):
    with pytest.raises(ModelLoadFailed, match="UNet2DConditionModel has no caches; leave cache_ba"):
        cached(BUNDLED, backend, **OPTIONS[backend])


def test_a_family_that_names_no_context_is_refused(tmp_path: Path):
    """SD3 has no caches of its own; with them it would still not name its calls."""
    folder = save_family("stable_diffusion_3", tmp_path)
    with pytest.raises(ModelLoadFailed, match="does not go with StableDiffusion3Pipeline"):
        cached(folder, "first_block_cache")
