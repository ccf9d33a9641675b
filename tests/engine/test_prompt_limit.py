"""Prompts are cut where a warning says so, and not before: held against what pipelines encode."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.lab.families import save_family
from tests.engine.conftest import plan
from workers.engine.loader import load_pipeline
from workers.engine.pipelines import cut_warnings, max_prompt_tokens, prompt_limits
from workers.patches import ImageTextProcessor


def tensors(value: Any) -> list[torch.Tensor]:
    if torch.is_tensor(value):
        return [value]
    return [each for item in value or () for each in tensors(item)]


def is_read(pipe: Any, prompt: str, last: str, other: str) -> bool:
    """Tell whether the encoding of a prompt depends on how it ends."""
    options: dict[str, Any] = {"do_classifier_free_guidance": False}
    length = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
    if length is not None:
        options["max_sequence_length"] = length.default
    one, two = (tensors(pipe.encode_prompt(prompt + end, **options)) for end in (last, other))
    return not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", ["z_image", "pixart", "wan", "ltx", "latte"])
def test_the_last_token_that_is_read_is_the_last_without_a_warning(name: str, tmp_path: Path):
    pipe = load_pipeline(plan(save_family(name, tmp_path)))
    most = max_prompt_tokens(pipe)
    assert most is not None
    ((tokenizer, limit),) = prompt_limits(pipe)
    assert limit == most
    # One token each, in the vocabulary of bytes and in that of words.
    special = len(tokenizer("").input_ids)
    word = "a" if len(tokenizer("a a").input_ids) - special > 2 else "a "
    lasts = ("b", "c") if word == "a" else ("red", "blue")
    fitting = word * (most - special - 1)
    assert cut_warnings([(tokenizer, limit)], "prompt", fitting + lasts[0]) == ()
    (warning,) = cut_warnings([(tokenizer, limit)], "prompt", fitting + word + lasts[0])
    assert warning == f"prompt: the last 1 tokens were cut, because the model reads at most {most}"
    with torch.inference_mode():
        assert is_read(pipe, fitting, *lasts)
        # The end of a text takes a place of its own in those that mark it.
        assert not is_read(pipe, fitting + word * (1 + special), *lasts)


def test_a_tokenizer_within_a_processor_has_a_limit_too(tmp_path: Path):
    """As FLUX.2 has one."""
    pipe = load_pipeline(plan(save_family("qwen_image_edit", tmp_path)))
    assert isinstance(pipe.processor, ImageTextProcessor)
    expected = max_prompt_tokens(pipe)
    pipe.tokenizer = pipe.processor
    assert max_prompt_tokens(pipe) == expected is not None
