"""A real browser without a window for the tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service as Driver

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,900",
)


def find_browser() -> tuple[str, str]:
    """Return the paths of Chromium and its driver; without them skip, or fail where CI is set."""
    browser = next((found for name in _NAMES if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    reason = f"needs chromium and chromedriver on PATH; found {browser} and {driver}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def open_browser(profile: Path) -> Iterator[Chrome]:
    """Open a browser with a new profile in the folder `profile`."""
    browser, driver = find_browser()
    options = ChromeOptions()
    options.binary_location = browser
    for argument in (*_ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # The driver is named, so that selenium does not look for one elsewhere.
    opened = Chrome(options=options, service=Driver(driver))
    try:
        yield opened
    finally:
        opened.quit()
