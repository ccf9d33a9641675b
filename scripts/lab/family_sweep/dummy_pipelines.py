"""The tiny pipelines of random weights that diffusers' own tests are made of.

They are read from a checkout of its repository when they are needed; nothing of it is kept here.
"""

import ast
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from configs.errors import ModelLoadFailed
from scripts.lab.family_sweep.hub_stand_ins import hub_stand_ins
from workers.engine.pipelines import own_tasks

_BUILDER = "get_dummy_components"


# What requests have, or what is not theirs to say.
_REQUESTED = frozenset(
    (
        *("prompt", "negative_prompt", "image", "mask_image", "width", "height", "strength"),
        *("num_inference_steps", "guidance_scale", "true_cfg_scale", "num_frames", "video_length"),
        *("fps", "frame_rate", "frames", "generator", "output_type", "return_dict", "latents"),
        *("num_images_per_prompt", "num_videos_per_prompt", "max_area", "clean_caption"),
    )
)


@dataclass(frozen=True)
class TestClass:
    """A class of diffusers' tests that builds a pipeline.

    Attributes:
        module: Where it is.
        name: Its own.
    """

    __test__ = False

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('tests.pipelines.')}.{self.name}"


def test_classes(checkout: Path) -> Iterator[TestClass]:
    """Yield those that build a pipeline of their own; nothing is imported."""
    for path in sorted(checkout.glob("tests/pipelines/*/test_*.py")):
        module = ".".join(path.relative_to(checkout).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.ClassDef)
                and node.bases
                and any(
                    isinstance(item, ast.FunctionDef) and item.name == _BUILDER
                    for item in node.body
                )
            ):
                yield TestClass(module, node.name)


def save_pipeline(found: TestClass, folder: Path, tell: Callable[[str], None]) -> Mapping[str, Any]:
    """Build the pipeline of a class and save it to `folder`, as models are saved.

    The checkout must be the first place that modules are imported from. `tell` is told the name of
    the pipeline's class. Returns what the test calls it with.

    Raises:
        ModelLoadFailed: It is of no task that is served.
    """
    with hub_stand_ins():
        made = getattr(importlib.import_module(found.module), found.name)()
        name = _own_name(made.pipeline_class)
        tell(name)
        if not own_tasks(getattr(diffusers, name)):
            raise ModelLoadFailed(
                f"{name} needs or makes something that requests have no field for"
            )
        torch.manual_seed(0)
        components = made.get_dummy_components()
        takes_device = "device" in inspect.signature(made.get_dummy_inputs).parameters
        inputs = made.get_dummy_inputs("cpu") if takes_device else made.get_dummy_inputs()
    pipeline_class = getattr(diffusers, name)
    _call_as_tested(pipeline_class, inputs)
    for part in components.values():
        _make_known(part)
    pipe = pipeline_class(**components)
    pipe.save_pretrained(folder)
    _name_real_parts(folder / "model_index.json")
    called_with: Mapping[str, Any] = inputs
    return called_with


def _own_name(pipeline_class: Any) -> str:
    """Name of the class of diffusers that a test's class is, or wraps."""
    names: list[str] = [each.__name__ for each in pipeline_class.__mro__]
    return next(name for name in names if hasattr(diffusers, name))


def _call_as_tested(pipeline_class: Any, inputs: Mapping[str, Any]) -> None:
    """Make what a test calls its tiny pipeline with the default, where no request has it.

    Such as a length of texts that the tiny denoiser has positions for. For this process.
    """
    call: Any = inspect.unwrap(pipeline_class.__call__)
    parameters = inspect.signature(call).parameters.values()
    named = [each for each in parameters if each.default is not each.empty]
    positional = [each for each in named if each.kind is not each.KEYWORD_ONLY]
    # Kandinsky's is as short as the real tokenizer makes its own words.
    without = {"max_sequence_length"} if pipeline_class.__name__.startswith("Kandinsky5") else set()
    own = {
        name: value
        for name, value in inputs.items()
        if name not in _REQUESTED | without
        and isinstance(value, (int, float, str, list, tuple, dict))
    }
    call.__defaults__ = tuple(own.get(each.name, each.default) for each in positional)


def _make_known(part: Any) -> None:
    """Let a part that a test made up be loaded, as the one that it stands for would be."""
    kind = type(part)
    if kind.__module__.startswith("tests.") and hasattr(kind, "from_pretrained"):
        library = importlib.import_module(f"diffusers.pipelines.{kind.__module__.split('.')[2]}")
        setattr(library, kind.__name__, kind)
        if not list(part.parameters()):
            kind.from_pretrained = classmethod(lambda kind, *_, **__: kind())


def _name_real_parts(index: Path) -> None:
    """Write the processor down as the real models have it, whose processor is transformers' own."""
    parts = json.loads(index.read_text())
    for name, kind in parts.items():
        if isinstance(kind, list) and kind[1] == "ImageTextProcessor":
            parts[name] = ["transformers", "Qwen2VLProcessor"]
    index.write_text(json.dumps(parts))
