"""What is decoded at once, what becomes of it short of memory, and what memory is kept free."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor

from configs.errors import OutOfMemory
from scripts.lab.family_trial import pixels
from tests.engine.conftest import MakeParameters
from tests.engine.recorder import Recorder
from workers.engine import decoder
from workers.engine.engine import Engine
from workers.engine.generation import byte_frames, to_videos
from workers.sharing.call import BatchStats


class Scarce:
    """Memory of an autoencoder's decoder for so many outputs, so many latents wide."""

    def __init__(self, pipe: Any, outputs: int, width: int = 1000) -> None:
        self.outputs, self.width = outputs, width
        self.shapes: list[tuple[int, int]] = []
        pipe.vae.decoder.register_forward_pre_hook(self._look)

    def _look(self, _decoder: Any, arguments: tuple[Any, ...]) -> None:
        outputs, width = arguments[0].shape[0], arguments[0].shape[-1]
        if outputs > self.outputs or width > self.width:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        self.shapes.append((outputs, width))


def test_large_outputs_of_a_lone_request_are_decoded_one_by_one(
    own_engine: Engine,
    pipe: Any,
    parameters: MakeParameters,
    monkeypatch: pytest.MonkeyPatch,
):
    asked = parameters(num_outputs_per_prompt=3)
    seen = Scarce(pipe, outputs=3)
    own_engine.generate(asked, Recorder())
    monkeypatch.setattr(decoder, "DECODED_AT_ONCE", 2 * 64 * 64)
    own_engine.generate(asked, Recorder())
    assert [outputs for outputs, _ in seen.shapes] == [3, 1, 1, 1]
    assert pipe.vae.use_slicing is False


def test_short_of_memory_a_run_decodes_one_by_one_then_in_tiles_and_says_where_it_shows(
    own_engine: Engine, pipe: Any, parameters: MakeParameters
):
    asked = parameters(num_outputs_per_prompt=2)
    whole = own_engine.generate(asked, Recorder())
    memory = Scarce(pipe, outputs=1)
    sliced = own_engine.generate(asked, Recorder())
    assert sliced.warnings == ()
    assert max(np.abs(pixels(sliced, k) - pixels(whole, k)).max() for k in range(2)) <= 1

    latents = 64 // pipe.vae_scale_factor
    pipe.vae.tile_latent_min_size = memory.width = latents // 2
    pipe.vae.tile_sample_min_size = 32
    memory.shapes.clear()
    tiled = own_engine.generate(asked, Recorder())
    assert {outputs for outputs, _ in memory.shapes} == {1}
    assert len(tiled.images) == 2
    assert tiled.warnings == (
        "it was decoded in tiles, because the memory was too small; seams may show",
    )

    memory.width = 1
    with pytest.raises(OutOfMemory):
        own_engine.generate(asked, Recorder())
    assert (pipe.vae.use_slicing, pipe.vae.use_tiling) == (False, False)


def test_what_a_decode_takes_is_kept_free_of_merged_forwards(
    sharing: Engine, monkeypatch: pytest.MonkeyPatch
):
    class Cost:
        """As on a GPU."""

        peak_bytes = 100

        def __init__(self, _device: torch.device) -> None:
            pass

        def __enter__(self) -> "Cost":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(decoder, "ForwardCost", Cost)
    reserved: list[int] = []
    monkeypatch.setattr(sharing.rendezvous, "reserve", reserved.append)
    sharing.warm_up()
    # As many of the default size as are decoded at once.
    size = sharing.abilities.default_width * sharing.abilities.default_height
    assert reserved == [100 * (decoder.DECODED_AT_ONCE // size)]

    stats = BatchStats(lambda: 1000)
    stats.note_memory(2, peak_bytes=200, free_bytes=2000)
    assert stats.allows(8)
    assert not stats.allows(9)
    stats.note_memory(2, peak_bytes=200, free_bytes=900)
    assert not stats.allows(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_frames_become_the_same_bytes_on_the_device_as_on_the_host(dtype: torch.dtype):
    class Pipe:
        video_processor = VideoProcessor(vae_scale_factor=8)

    made = torch.randn(2, 3, 5, 8, 12, generator=torch.manual_seed(0)).to(dtype)
    floats = Pipe.video_processor.postprocess_video(made, output_type="np")
    own = byte_frames(Pipe())
    assert own is not None
    given = own.postprocess_video(made, output_type="np")
    assert given.dtype == np.uint8
    for video, expected in zip(to_videos(given, 8), to_videos(floats, 8), strict=True):
        assert np.array_equal(video.frames, expected.frames)
    assert Pipe.video_processor.postprocess_video(made, output_type="np").dtype == np.float32


def test_frames_that_a_pipeline_checks_stay_floats():
    class Checked:
        video_processor = VideoProcessor(vae_scale_factor=8)
        safety_checker = object()

    assert byte_frames(Checked()) is None
    assert byte_frames(object()) is None
