"""Adapters through the whole service: listed, asked for by name, and left alone by the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from configs.settings import REPOSITORY
from tests.e2e.browser import open_browser
from tests.e2e.service import Service, running_alone
from tests.e2e.test_page import PATIENCE_S, Page
from tests.engine.lora_files import save_lora_like
from tests.waiting import wait_until

PROMPT = "a large red circle on a blue background"
STYLE = {"name": "style", "scale": 0.8}


@pytest.fixture(scope="module")
def adapted(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("adapted")
    (folder / "loras").mkdir()
    weights = load_file(REPOSITORY / "models/tiny/unet/diffusion_pytorch_model.safetensors")
    save_lora_like(folder / "loras" / "style.safetensors", "unet", weights, 1)
    (folder / "loras" / "torn.safetensors").write_bytes(b"no weights")
    settings = {"max_num_seqs": 4, "lora_dir": str(folder / "loras")}
    with running_alone(redis_url, folder, **settings) as service:
        yield service


def test_an_adapter_is_served_to_whoever_names_it_and_to_nobody_else(adapted: Service) -> None:
    assert adapted.call("GET", "/v1/models").json["data"][0]["loras"] == ["style", "torn"]
    plain = adapted.output(adapted.ended(adapted.submit(PROMPT, seed=1)["id"])).image
    asked = [
        adapted.submit(PROMPT, seed=1, num_inference_steps=60, **({"lora": lora} if lora else {}))
        for lora in (STYLE, None, [STYLE], None, {"name": "torn"})
    ]
    ended = [adapted.ended(each["id"]) for each in asked]
    assert [each["status"] for each in ended] == ["succeeded"] * 4 + ["failed"]
    assert ended[4]["error"]["code"] == "lora_load_failed"
    assert ended[0]["parameters"]["lora"] == ended[2]["parameters"]["lora"] == [STYLE]
    pictures = [adapted.output(each).image for each in ended[:4]]
    texts = [getattr(picture, "text", {}).get("lora") for picture in pictures]
    assert texts == ["style 0.8", None, "style 0.8", None]
    assert _worst(pictures[0], pictures[2]) <= 1
    assert _worst(pictures[1], pictures[3]) <= 1
    assert _worst(pictures[0], pictures[1]) > 8
    after = adapted.output(adapted.ended(adapted.submit(PROMPT, seed=1)["id"])).image
    assert after.tobytes() == plain.tobytes()


@pytest.mark.browser
def test_the_page_offers_the_adapters(adapted: Service, tmp_path: Path) -> None:
    with open_browser(tmp_path / "profile") as browser:
        page = Page(browser, adapted.url + "/")
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
