"""What is put over attributes of other people's objects, and taken away again."""

import copy
import inspect
from typing import Any

import pytest
import torch
from diffusers import PNDMScheduler, StableDiffusionPipeline

from workers.patches import (
    AlreadyPatched,
    become,
    execution_device,
    method_signature,
    note_device,
    patched,
    put,
)


class Thing:
    name = "the class's"

    def step(self, time: int, *, fast: bool = False) -> str:
        return f"{time} {fast}"


def test_what_was_there_comes_back():
    thing = Thing()
    with patched(thing, "name", "ours"):
        assert thing.name == "ours"
        assert Thing.name == "the class's"
    assert thing.name == "the class's"
    assert vars(thing) == {}


def test_what_was_there_comes_back_after_an_error_too():
    thing = Thing()
    with pytest.raises(KeyError), patched(thing, "name", "ours"):
        raise KeyError
    assert vars(thing) == {}


def test_a_second_change_is_refused_unless_it_is_meant():
    thing = Thing()
    restore = put(thing, "name", "first")
    with pytest.raises(AlreadyPatched, match=r"Thing\.name is replaced already"):
        put(thing, "name", "second")
    with patched(thing, "name", "second", over=True):
        assert thing.name == "second"
    assert thing.name == "first"
    restore()
    assert thing.name == "the class's"


def test_nothing_that_stands_over_a_change_is_taken_away_with_it():
    thing = Thing()
    restore = put(thing, "name", "first")
    put(thing, "name", "second", over=True)
    with pytest.raises(AlreadyPatched, match="something else stands over name"):
        restore()
    assert thing.name == "second"


def test_a_part_that_is_put_in_is_not_written_into_the_configuration(pipe: Any):
    assert isinstance(pipe, StableDiffusionPipeline)
    before = dict(pipe.config)
    with patched(pipe, "scheduler", PNDMScheduler(), over=True):
        assert isinstance(pipe.scheduler, PNDMScheduler)
        assert dict(pipe.config) == before
    assert not isinstance(pipe.scheduler, PNDMScheduler)


def test_a_module_that_is_put_in_is_no_part():
    module = torch.nn.Linear(1, 1)
    with patched(module, "other", torch.nn.Linear(2, 2)):
        assert list(module.children()) == []
        assert len(module.state_dict()) == 2


def test_an_object_becomes_one_of_both_classes():
    class Slow:
        def step(self, time: int, *, fast: bool = False) -> str:
            inherited: Any = super()
            return f"slow {inherited.step(time, fast=fast)}"

    thing = Thing()
    become(thing, "Slow", Slow, {"order": 2})
    assert isinstance(thing, Slow)
    assert (type(thing).__name__, thing.step(1)) == ("Slow", "slow 1 False")
    assert vars(type(thing))["order"] == 2
    assert type(Thing()) is Thing


def test_a_method_s_signature_is_that_of_its_objects():
    assert method_signature(Thing.step) == inspect.signature(Thing().step)


def test_a_pipeline_that_knows_its_device_is_of_its_kind_and_so_are_its_copies(pipe: Any):
    device = execution_device(pipe)
    note_device(pipe)
    for each in (pipe, copy.copy(pipe)):
        assert isinstance(each, StableDiffusionPipeline)
        assert type(each).__name__ == "StableDiffusionPipeline"
        assert execution_device(each) == device
