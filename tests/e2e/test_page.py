"""The playground in a real browser, against a running service with the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.e2e.browser import open_browser
from tests.e2e.service import Service
from tests.pictures import picture
from tests.waiting import wait_until

pytestmark = pytest.mark.browser

PATIENCE_S = 30.0
LONG = "500"


class Page:
    """The page as a person uses it."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        browser.get(url)
        wait_until(lambda: self.field("width").get_attribute("value"), PATIENCE_S, "the defaults")

    def field(self, name: str) -> WebElement:
        return self.browser.find_element(By.NAME, name)

    def fill(self, **values: str) -> None:
        for name, value in values.items():
            self.field(name).clear()
            self.field(name).send_keys(value)

    def cards(self) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, "#requests > li")

    def status_of_first(self) -> str | None:
        """The status of the newest card, read in one step: cards come, change and go."""
        status: str | None = self.run(
            "return document.querySelector('#requests li')?.dataset.status"
        )
        return status

    def press(self, button: str) -> None:
        self.cards()[0].find_element(By.CLASS_NAME, button).click()

    def press_generate(self) -> None:
        self.browser.find_element(By.CSS_SELECTOR, "button[type=submit]").click()

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def complaints(self) -> list[str]:
        """What the browser's console says, answers of 4xx that a test asked for left out."""
        entries = self.browser.get_log("browser")
        return [entry["message"] for entry in entries if entry["source"] != "network"]


@pytest.fixture
def page(service: Service, tmp_path: Path) -> Iterator[Page]:
    with open_browser(tmp_path / "profile") as browser:
        yield Page(browser, service.url + "/")


def test_enter_makes_a_picture_that_is_shown(page: Page, service: Service) -> None:
    page.fill(prompt="a red circle on a blue background", seed="7")
    page.field("prompt").send_keys(Keys.ENTER)
    wait_until(lambda: page.status_of_first() == "succeeded", PATIENCE_S, "the picture")
    drawn = (
        "const i = document.querySelector('#requests .outputs img');"
        "return i?.complete && i.naturalWidth"
    )
    assert wait_until(lambda: page.run(drawn), PATIENCE_S, "the picture to be drawn") == 64
    text = page.cards()[0].text
    assert "a red circle on a blue background" in text
    assert "seed 7" in text
    assert "on replica" in text
    image = page.cards()[0].find_element(By.CSS_SELECTOR, ".outputs img")
    assert image.get_attribute("alt") == "a red circle on a blue background"
    assert image.size == {"width": 256, "height": 256}
    assert image.value_of_css_property("image-rendering") == "pixelated"
    link = page.cards()[0].find_element(By.LINK_TEXT, "Download").get_attribute("href")
    assert link is not None
    assert service.call("GET", link.removeprefix(service.url)).status == 200
    assert page.complaints() == []

    page.browser.refresh()
    wait_until(lambda: page.status_of_first() == "succeeded", PATIENCE_S, "the card to be back")
    page.press("remove")
    wait_until(lambda: not page.cards(), PATIENCE_S, "the card to go")


def test_progress_is_shown_and_cancel_stops_it(page: Page) -> None:
    page.fill(prompt="a green square on a white background", num_inference_steps=LONG)
    page.browser.find_element(By.CSS_SELECTOR, "button[type=submit]").click()
    shown = "return document.querySelector('#requests progress')?.value"
    wait_until(lambda: page.run(shown), PATIENCE_S, "progress")
    assert f"of {LONG} on replica" in page.cards()[0].find_element(By.CLASS_NAME, "status").text
    page.press("cancel")
    wait_until(lambda: page.status_of_first() == "canceled", PATIENCE_S, "the end")
    assert page.complaints() == []


def test_wrong_fields_are_named_as_a_person_would(page: Page) -> None:
    page.fill(prompt="", width="63")
    page.field("prompt").send_keys(Keys.ENTER)
    error = page.browser.find_element(By.ID, "form-error")
    text = wait_until(lambda: error.text, PATIENCE_S, "the error")
    assert set(text.splitlines()) == {
        "Prompt: is missing",
        "Width: 63 is not a multiple of 8; use 56 or 64",
    }
    assert page.field("width").get_attribute("aria-invalid") == "true"
    assert page.field("height").get_attribute("aria-invalid") == "false"
    assert page.cards() == []


def test_the_replicas_are_shown_with_their_state(page: Page) -> None:
    strip = page.browser.find_element(By.ID, "replicas")
    wait_until(lambda: strip.text.count("ready") == 2, PATIENCE_S, "both replicas")
    assert "replica0" in strip.text
    assert "replica1" in strip.text


def test_every_field_has_a_label(page: Page) -> None:
    fields = page.browser.find_elements(By.CSS_SELECTOR, "input, select, textarea, button")
    assert [field.accessible_name for field in fields if field.is_displayed()].count("") == 0


def test_the_docs_opens_the_spec_from_here(page: Page, service: Service) -> None:
    page.browser.get(f"{service.url}/docs")
    path = "/v1/requests/{request_id}/cancel"
    wait_until(
        lambda: path in page.browser.find_element(By.ID, "calls").text, PATIENCE_S, "the calls"
    )
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in loaded if not name.startswith((service.url, "data:"))] == []
    assert page.complaints() == []


def test_a_running_request_shows_how_it_looks_so_far(page: Page) -> None:
    page.fill(prompt="a red circle on a blue background", num_inference_steps=LONG)
    page.field("prompt").send_keys(Keys.ENTER)
    drawn = "return document.querySelector('#requests .preview')?.naturalWidth"
    wait_until(lambda: page.run(drawn) == 64, PATIENCE_S, "a preview")
    assert page.cards()[0].find_element(By.CLASS_NAME, "preview").is_displayed()
    page.press("cancel")
    wait_until(lambda: page.status_of_first() == "canceled", PATIENCE_S, "the cancel")
    assert not page.cards()[0].find_element(By.CLASS_NAME, "preview").is_displayed()
    assert page.complaints() == []


def test_a_part_of_a_chosen_image_is_made_anew(
    page: Page, service: Service, tmp_path: Path
) -> None:
    (tmp_path / "start.png").write_bytes(picture(80, 48, color="blue"))
    (tmp_path / "mask.png").write_bytes(picture(80, 48, color="white"))
    assert not page.field("strength").is_displayed()
    page.field("image").send_keys(str(tmp_path / "start.png"))
    assert page.field("strength").is_displayed()
    page.field("mask_image").send_keys(str(tmp_path / "mask.png"))
    page.fill(prompt="a red circle on a blue background", strength="0.9")
    page.press_generate()
    wait_until(lambda: page.status_of_first() == "succeeded", PATIENCE_S, "the picture")
    request = service.call("GET", "/v1/requests?limit=1").json["data"][0]
    assert request["task"] == "inpaint"
    parameters = request["parameters"]
    assert (parameters["width"], parameters["height"]) == (80, 48)
    assert parameters["strength"] == 0.9
    assert page.run("return document.querySelectorAll('#requests .inputs img').length") == 2

    page.run("document.getElementById('form').reset()")
    page.press("reuse")
    chosen = "return document.getElementsByName('mask_image')[0].files.length"
    wait_until(lambda: page.run(chosen) == 1, PATIENCE_S, "the inputs to be put back")
    assert page.field("strength").get_attribute("value") == "0.9"
    assert page.complaints() == []
