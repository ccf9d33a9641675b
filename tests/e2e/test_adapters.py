"""Adapters through the whole service: listed, asked for by name, and left alone by the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.e2e.browser import open_browser
from tests.e2e.service import Service
from tests.e2e.test_page import PATIENCE_S, Page
from tests.waiting import wait_until

PROMPT = "a large red circle on a blue background"
STYLE = {"name": "style", "scale": 0.8}


def test_an_adapter_is_served_to_whoever_names_it_and_to_nobody_else(roomy: Service) -> None:
    assert roomy.call("GET", "/v1/models").json["data"][0]["loras"] == ["style", "torn"]
    plain = roomy.output(roomy.ended(roomy.submit(PROMPT, seed=1)["id"])).image
    asked = [
        roomy.submit(PROMPT, seed=1, num_inference_steps=60, **({"lora": lora} if lora else {}))
        for lora in (STYLE, None, [STYLE], None, {"name": "torn"})
    ]
    ended = [roomy.ended(each["id"]) for each in asked]
    assert [each["status"] for each in ended] == ["succeeded"] * 4 + ["failed"]
    assert ended[4]["error"]["code"] == "lora_load_failed"
    assert ended[0]["parameters"]["lora"] == ended[2]["parameters"]["lora"] == [STYLE]
    pictures = [roomy.output(each).image for each in ended[:4]]
    texts = [getattr(picture, "text", {}).get("lora") for picture in pictures]
    assert texts == ["style 0.8", None, "style 0.8", None]
    assert _worst(pictures[0], pictures[2]) <= 1
    assert _worst(pictures[1], pictures[3]) <= 1
    assert _worst(pictures[0], pictures[1]) > 8
    after = roomy.output(roomy.ended(roomy.submit(PROMPT, seed=1)["id"])).image
    assert after.tobytes() == plain.tobytes()


@pytest.mark.browser
def test_the_page_offers_the_adapters(roomy: Service, tmp_path: Path) -> None:
    with open_browser(tmp_path / "profile") as browser:
        page = Page(browser, roomy.url + "/")
        offered = Select(page.field("lora"))
        assert [option.text for option in offered.options] == ["none", "style", "torn"]
        offered.select_by_visible_text("style")
        page.fill(prompt=PROMPT, lora_scale="0.8", seed="1")
        page.field("prompt").send_keys(Keys.ENTER)
        wait_until(lambda: page.status_of_first() == "succeeded", PATIENCE_S, "the picture")
        assert "style 0.8" in page.cards()[0].text
        offered.select_by_visible_text("none")
        page.press("reuse")
        wait_until(
            lambda: offered.first_selected_option.text == "style", PATIENCE_S, "the settings"
        )
        assert page.field("lora_scale").get_attribute("value") == "0.8"
        assert not page.complaints()


def _worst(one: Image.Image, other: Image.Image) -> int:
    return max(abs(a - b) for a, b in zip(one.tobytes(), other.tobytes(), strict=True))
