"""The prompt-embedding cache: a hit has the bytes of a miss, and what differs is encoded anew."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.parameters import Lora
from configs.stage_config import PipelineSettings
from tests.engine.conftest import MakeParameters, plan
from tests.engine.lora_files import save_lora
from tests.engine.recorder import Recorder
from tests.engine.tiny_families import FAMILIES, save_family
from workers.engine.engine import Engine
from workers.engine.features.prompt_cache import PromptCache
from workers.engine.loader import load_pipeline


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("loras")
    pipe = load_pipeline(plan())
    save_lora(folder / "words.safetensors", {"text_encoder": pipe.text_encoder}, 1)
    save_lora(folder / "style.safetensors", {"unet": pipe.unet}, 2)
    return Engine.load(plan(pipeline=PipelineSettings(lora_dir=str(folder))))


@pytest.fixture(scope="module")
def uncached() -> Engine:
    return Engine.load(plan(pipeline=PipelineSettings(enable_prompt_embed_cache=False)))


def made(engine: Engine, parameters: Any) -> bytes:
    return engine.generate(parameters, Recorder()).images[0].tobytes()


def counted(engine: Engine) -> tuple[int, int]:
    for feature in engine.features:
        if isinstance(feature, PromptCache):
            return feature.hits, feature.misses
    return 0, 0


def test_a_hit_has_the_bytes_of_a_miss_and_of_no_cache(
    cached: Engine, uncached: Engine, parameters: MakeParameters
):
    encodings: list[Any] = []
    cached.pipe.text_encoder.register_forward_pre_hook(lambda *_: encodings.append(None))
    asked = parameters(prompt="a green ring")
    images = [made(cached, asked)]
    once = len(encodings)
    assert once
    images += [made(cached, asked), made(uncached, asked), made(uncached, asked)]
    assert len(encodings) == once
    assert len(set(images)) == 1
    assert counted(uncached) == (0, 0)
    other_seed = made(cached, parameters(prompt="a green ring", seed=2))
    assert len(encodings) == once
    assert other_seed == made(uncached, parameters(prompt="a green ring", seed=2))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a white star"},
        {"negative_prompt": "a blue background"},
        {"num_outputs_per_prompt": 2},
        {"guidance_scale": 0.0},
        {"clip_skip": 1},
        {"prompt_weighting": True},
        {"lora": (Lora("words"),)},
        {"lora": (Lora("words", 0.5),)},
    ],
)
def test_another_encoding_is_made_anew(
    cached: Engine, uncached: Engine, parameters: MakeParameters, change: dict[str, Any]
):
    asked = {"prompt": "a white ring", "num_inference_steps": 2}
    made(cached, parameters(**asked))
    hits, misses = counted(cached)
    first = made(cached, parameters(**{**asked, **change}))
    assert counted(cached) == (hits, misses + 1)
    if "lora" not in change:
        assert first == made(uncached, parameters(**{**asked, **change}))
    assert made(cached, parameters(**{**asked, **change})) == first
    assert counted(cached) == (hits + 1, misses + 1)


def test_words_are_weighed_where_that_is_asked_for(cached: Engine, parameters: MakeParameters):
    def drawn(prompt: str, **more: Any) -> bytes:
        usual = {"num_inference_steps": 2, "prompt_weighting": True}
        return made(cached, parameters(prompt=prompt, **{**usual, **more}))

    plain = drawn("a white ring")
    assert plain == drawn("a white ring", prompt_weighting=False)
    assert plain == drawn("a (white:1.0) ring")
    weighed = drawn("a (white:1.6) ring")
    assert len({plain, weighed, drawn("a (white:0.2) ring")}) == 3
    assert weighed != drawn("a (white:1.6) ring", prompt_weighting=False)
    assert weighed == drawn("a (white:1.6) ring")
    assert weighed != drawn("a (white:1.6) ring", clip_skip=1)
    assert weighed != drawn("a (white:1.6) ring", negative_prompt="(blue:1.5)")


def test_a_weight_moves_the_tokens_of_its_word_alone(tmp_path: Path, parameters: MakeParameters):
    """Of the right output too, where a call makes several; with the two encoders of SDXL."""
    engine = Engine.load(plan(save_family("stable_diffusion_xl", tmp_path)))
    seen: list[torch.Tensor] = []

    def look(_module: Any, _args: Any, named: dict[str, Any]) -> None:
        seen.append(named["encoder_hidden_states"].clone())

    engine.pipe.unet.register_forward_pre_hook(look, with_kwargs=True)
    asked = {"width": 32, "height": 32, "num_inference_steps": 1, "num_outputs_per_prompt": 2}
    for prompt in ("a white ring", "a (white:1.5) ring", "(a white ring:1.0)"):
        engine.generate(parameters(prompt=prompt, prompt_weighting=True, **asked), Recorder())
    plain, weighed, same = (each.chunk(2)[1] for each in seen)
    assert torch.equal(plain, same)
    moved = (plain != weighed).flatten(2).any(-1)
    tokenizer = engine.pipe.tokenizer
    before, word = (len(tokenizer(text).input_ids) - 2 for text in ("a", "a white"))
    expected = torch.zeros_like(moved)
    expected[:, 1 + before : 1 + word] = True
    assert torch.equal(moved, expected)


def test_an_adapter_of_the_denoiser_alone_shares_the_encoding(
    cached: Engine, parameters: MakeParameters
):
    made(cached, parameters(prompt="a red ring"))
    hits, misses = counted(cached)
    made(cached, parameters(prompt="a red ring", lora=(Lora("style"),)))
    assert counted(cached) == (hits + 1, misses)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_hits_with_the_same_bytes(
    tmp_path: Path, parameters: MakeParameters, name: str
):
    engine = Engine.load(plan(save_family(name, tmp_path)))
    asked: dict[str, Any] = {"width": 32, "height": 32, "num_inference_steps": 2}
    if engine.abilities.default_frames is not None:
        asked |= {"task": "text-to-video", "num_frames": 1 + engine.abilities.frames_step}
    outputs = []
    for _ in range(2):
        generation = engine.generate(parameters(**asked), Recorder())
        videos = [video.frames.tobytes() for video in generation.videos]
        outputs.append([*(image.tobytes() for image in generation.images), *videos])
    assert outputs[0] == outputs[1]
    assert counted(engine)[0] == counted(engine)[1] > 0


class Encoder:
    """A pipeline of nothing but `encode_prompt`; 400 bytes for each text."""

    calls = 0

    def encode_prompt(self, prompt: Any, scale: float = 1.0, embeds: Any = None) -> Any:
        self.calls += 1
        return torch.full((100,), float(len(prompt))), [None, torch.zeros(0)]


def watched(most_bytes: int) -> tuple[Any, PromptCache]:
    pipe, cache = Encoder(), PromptCache(most_bytes)
    attach(cache, pipe)
    return pipe, cache


def attach(cache: PromptCache, pipe: Any) -> None:
    run: Any = SimpleNamespace(pipe=pipe, text_state=())
    cache.attach(run)


def test_what_was_used_longest_ago_goes_first_and_the_bytes_stay_below():
    pipe, cache = watched(1000)
    for text in ("a", "bb", "a", "ccc", "a"):
        pipe.encode_prompt(text)
        assert cache.bytes <= 1000
    assert (cache.hits, cache.misses, pipe.calls) == (2, 3, 3)
    pipe.encode_prompt("bb")
    assert pipe.calls == 4
    pipe.encode_prompt("x" * 2000)
    pipe.encode_prompt("x" * 2000)
    assert pipe.calls == 6


def test_a_change_of_what_was_given_changes_nothing_that_is_kept():
    pipe, _ = watched(1000)
    for _ in range(3):
        embeddings, more = pipe.encode_prompt("a")
        assert bool((embeddings == 1).all())
        embeddings.zero_()
        more.clear()
    assert pipe.calls == 1


def test_equal_values_of_different_types_are_different_and_tensors_are_passed_on():
    pipe, cache = watched(1000)
    for scale in (1, 1.0, True):
        pipe.encode_prompt("a", scale)
    assert pipe.calls == 3
    pipe.encode_prompt("a", embeds=torch.zeros(1))
    pipe.encode_prompt("a", embeds=torch.zeros(1))
    assert pipe.calls == 5
    assert cache.misses == 3


def test_the_bytes_that_are_kept_are_those_that_are_counted():
    """Many pipelines cut their embeddings out of larger ones."""

    class Cutting(Encoder):
        def encode_prompt(self, prompt: Any, scale: float = 1.0, embeds: Any = None) -> Any:
            return torch.zeros(100_000)[:100], torch.zeros(1).expand(100)

    pipe, cache = Cutting(), PromptCache(2000)
    attach(cache, pipe)
    pipe.encode_prompt("a")
    kept = pipe.encode_prompt("a")
    assert sum(each.untyped_storage().nbytes() for each in kept) == 800 < cache.bytes < 850


def test_a_watched_pipeline_does_not_hold_itself():
    pipe, _ = watched(1000)
    pipe.encode_prompt("a")
    gone = weakref.ref(pipe)
    gc.disable()
    try:
        del pipe
        assert gone() is None
    finally:
        gc.enable()
