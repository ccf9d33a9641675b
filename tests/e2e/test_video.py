"""Videos from a real worker: over the calls, and on the page in a real browser."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pytest

from tests.e2e.browser import open_browser
from tests.e2e.service import Service
from tests.e2e.test_page import Page
from tests.pictures import data_url, picture
from tests.waiting import wait_until

PATIENCE_S = 60.0


def played(data: bytes) -> tuple[dict[str, str], float, np.ndarray]:
    with av.open(io.BytesIO(data), "r") as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        return dict(file.metadata), float(file.streams.video[0].average_rate or 0), np.stack(frames)


def test_a_video_is_made_and_made_again(film: Service) -> None:
    first, second = (film.ended(film.submit(seed=7)["id"]) for _ in range(2))
    assert first["status"] == second["status"] == "succeeded"
    assert first["task"] == "text-to-video"
    output = first["outputs"][0]
    assert (output["media_type"], output["width"], output["height"]) == ("video/mp4", 64, 64)
    assert (output["num_frames"], output["fps"]) == (9, 12.0)
    answer = film.output(first)
    metadata, fps, frames = played(answer.content)
    assert (fps, frames.shape) == (12.0, (9, 64, 64, 3))
    assert json.loads(metadata["comment"])["seed"] == 7
    assert answer.content == film.output(second).content


def test_a_video_begins_from_an_image(film: Service) -> None:
    image = data_url(picture(80, 80))
    request = film.ended(film.submit(image=image, num_frames=17, fps=8)["id"])
    assert (request["status"], request["task"]) == ("succeeded", "image-to-video")
    assert (request["outputs"][0]["num_frames"], request["outputs"][0]["fps"]) == (17, 8.0)


@pytest.mark.browser
def test_the_page_plays_a_video_made_from_a_chosen_image(film: Service, tmp_path: Path) -> None:
    image = tmp_path / "start.png"
    image.write_bytes(picture(80, 80))
    with open_browser(tmp_path / "profile") as browser:
        page = Page(browser, film.url + "/")
        assert page.field("num_frames").get_attribute("value") == "9"
        assert not page.field("mask_image").is_displayed()
        page.field("image").send_keys(str(image))
        assert page.field("width").get_attribute("value") == ""
        page.fill(prompt="a red circle")
        page.press_generate()
        wait_until(lambda: page.status_of_first() == "succeeded", PATIENCE_S, "the video")
        shown = (
            "const v = document.querySelector('#requests .outputs video');"
            "return v?.readyState >= 2 && v.videoWidth"
        )
        assert wait_until(lambda: page.run(shown), PATIENCE_S, "the video to be shown") == 64
        assert "9 frames, 12 per second" in page.cards()[0].text
        assert page.complaints() == []
