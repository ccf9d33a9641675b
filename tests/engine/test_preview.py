"""Previews: small pictures from latents, without the autoencoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.conftest import MakeParameters
from tests.engine.recorder import Recorder
from workers.engine.engine import Engine
from workers.engine.features.preview import Preview


def test_the_last_preview_looks_like_the_picture(
    own_engine: Engine, parameters: MakeParameters
) -> None:
    engine, ask = own_engine, parameters
    assert not engine.abilities.preview
    engine.warm_up()
    assert engine.abilities.preview
    for seed in (1, 2, 3):
        engine.generate(ask(prompt="a green square on a red background", seed=seed), Recorder())
    recorder = Recorder(preview=True)
    asked = ask(seed=5)
    made = engine.generate(asked, recorder)
    assert [step for step, _ in recorder.previews] == list(range(1, made.steps + 1))
    step, last = recorder.previews[-1]
    assert step == made.steps
    assert last.size == (64, 64)
    shown = np.asarray(last.resize((8, 8), Image.Resampling.BOX)).astype(float)
    true = np.asarray(made.images[0].resize((8, 8), Image.Resampling.BOX)).astype(float)
    assert np.abs(shown - true).mean() < 25


def test_looking_changes_no_byte_of_the_output(engine: Engine, parameters: MakeParameters) -> None:
    asked = parameters(seed=5)
    looked_at = engine.generate(asked, Recorder(preview=True))
    assert looked_at.images[0].tobytes() == engine.generate(asked, Recorder()).images[0].tobytes()


def test_unfit_latents_and_nothing_learnt_give_no_picture() -> None:
    preview = Preview(cell=16)
    picture = Image.new("RGB", (64, 32))
    assert preview.render(torch.zeros(1, 4, 4, 8), 64, 32) is None
    preview.learn(torch.zeros(1, 7, 5), picture)
    preview.learn(torch.full((1, 4, 4, 8), torch.nan), picture)
    assert not preview.ready
    preview.learn(torch.randn(1, 4, 4, 8), picture)
    assert preview.ready
    assert preview.render(torch.zeros(1, 5, 4, 8), 64, 32) is None


@pytest.mark.parametrize("layout", ["picture", "frames", "tokens"])
def test_each_layout_of_latents_is_read_row_by_row(layout: str) -> None:
    """A left half that is red and a right half that is blue stay where they are."""
    generator = torch.Generator().manual_seed(0)
    red = torch.zeros(2, 4)
    red[:, :2] = 1
    cells = torch.stack([red, 1 - red, torch.randn(2, 4, generator=generator)], dim=0)
    latents = {
        "picture": cells[None],
        "frames": cells[None, :, None].repeat(1, 1, 3, 1, 1),
        "tokens": cells.permute(1, 2, 0).reshape(1, 8, 3),
    }[layout]
    picture = Image.new("RGB", (64, 32), (0, 0, 255))
    picture.paste((255, 0, 0), (0, 0, 32, 32))
    preview = Preview(cell=16)
    preview.learn(latents, picture)
    shown = preview.render(latents, 64, 32)
    assert shown is not None
    assert shown.size == (64, 32)
    left, right = shown.getpixel((8, 16)), shown.getpixel((56, 16))
    assert isinstance(left, tuple)
    assert isinstance(right, tuple)
    assert left[0] > 240 > 15 > left[2]
    assert right[2] > 240 > 15 > right[0]
