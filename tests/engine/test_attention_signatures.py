"""Noted signatures change nothing but how often they are looked for."""

import copy
import inspect
from typing import Any

import pytest
import torch

from tests.engine.tiny_families import FAMILIES, picture_of
from workers.devices.chunk import denoisers
from workers.patches import note_signatures


def processors(denoiser: Any) -> list[Any]:
    return [part.processor for part in denoiser.modules() if hasattr(part, "processor")]


@pytest.mark.parametrize("family", FAMILIES)
def test_processors_say_and_do_what_they_did(family: str):
    torch.manual_seed(0)
    pipe = FAMILIES[family]()
    pipe.set_progress_bar_config(disable=True)
    [denoiser] = denoisers(pipe).values()
    before = [inspect.signature(each.__call__) for each in processors(denoiser)]

    plain = picture_of(pipe)
    note_signatures(denoiser)
    note_signatures(denoiser)
    assert before
    assert [inspect.signature(each.__call__) for each in processors(denoiser)] == before
    assert picture_of(pipe) == plain


def test_a_copy_of_a_denoiser_calls_its_own_processors():
    [denoiser] = denoisers(FAMILIES["stable_diffusion_3"]()).values()
    note_signatures(denoiser)
    ours, theirs = processors(denoiser)[0], processors(copy.deepcopy(denoiser))[0]
    assert theirs is not ours
    assert theirs.__call__.args == (theirs,)


def test_processors_of_other_pipelines_are_as_they_were():
    [denoiser] = denoisers(FAMILIES["stable_diffusion_3"]()).values()
    [other] = denoisers(FAMILIES["stable_diffusion_3"]()).values()
    note_signatures(denoiser)
    assert all(inspect.ismethod(each.__call__) for each in processors(other))
    assert not hasattr(type(processors(denoiser)[0]).__call__, "__signature__")
