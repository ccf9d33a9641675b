"""Caches of diffusers keep state between the calls of one run: such runs share nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig

from configs.parameters import Parameters
from scripts.lab.image_families import flux
from tests.engine.recorder import Recorder
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.progress import Interrupted
from workers.patches import has_stateful_hooks

TIMEOUT_S = 60
STEPS = 6
ASKED = [
    Parameters(
        prompt=prompt,
        seed=seed,
        width=16,
        height=16,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
    )
    for seed, prompt in enumerate(("a star", "a red circle", "a heart"))
]


def caches(transformer: Any):
    return {
        "first block": FirstBlockCacheConfig(threshold=0.5),
        "MagCache": MagCacheConfig(
            threshold=0.5, retention_ratio=0.1, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS
        ),
        "PAB": PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1001),
            current_timestep_callback=lambda: 500,
        ),
    }


@pytest.mark.parametrize("cache", ["first block", "MagCache", "PAB"])
def test_requests_of_a_cached_model_run_one_at_a_time_and_make_what_each_makes_alone(cache: str):
    torch.manual_seed(0)
    pipe = flux()
    pipe.set_progress_bar_config(disable=True)
    abilities = inspect_abilities(pipe, {"width": 16, "height": 16})  # what it is warmed up for
    engine = Engine(pipe, abilities, max_num_seqs=4)
    engine.warm_up()
    plain = engine.generate(ASKED[0], Recorder())
    assert not has_stateful_hooks(pipe.transformer.modules())
    pipe.transformer.enable_cache(caches(pipe.transformer)[cache])
    assert has_stateful_hooks(pipe.transformer.modules())
    before = dict(engine.rendezvous.histogram)
    alone = [engine.generate(each, Recorder()) for each in ASKED]
    if cache != "PAB":
        assert alone[0].images[0].tobytes() != plain.images[0].tobytes()
    with pytest.raises(Interrupted):
        engine.generate(ASKED[1], Recorder(stop_at=4))
    start = threading.Barrier(3)

    def run(asked: Parameters):
        start.wait(TIMEOUT_S)
        return [engine.generate(asked, Recorder()) for _ in range(2)]

    with ThreadPoolExecutor(3) as pool:
        for made, expected in zip(pool.map(run, ASKED), alone, strict=True):
            for each in made:
                assert each.images[0].tobytes() == expected.images[0].tobytes()
                assert each.batch_mean == 1.0
    shared = {n: calls for n, calls in engine.rendezvous.histogram.items() if n > 1}
    assert shared == {n: calls for n, calls in before.items() if n > 1}
