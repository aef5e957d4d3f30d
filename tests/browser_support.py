"""A real browser for tests: Debian's chromium, headless, with no network of its own."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
WAIT_SECONDS = 60


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser whose profile is a fresh folder. Names the package to install if it is absent."""
    paths = [shutil.which("chromium"), shutil.which("chromedriver")]
    if None in paths:
        raise RuntimeError("install chromium and chromium-driver: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(paths[0])
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=str(paths[1])))
    try:
        yield driver
    finally:
        driver.quit()


def open_page(driver: webdriver.Chrome, page: Path, *, width: int, dark: bool = False) -> None:
    """Load a page from disk at a width in CSS pixels, and wait until its script is done."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    resize(driver, width=width, height=900)
    driver.get(page.as_uri())
    wait_until(driver, "return document.documentElement.dataset.ready === 'yes'")


def resize(driver: webdriver.Chrome, *, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wait_until(driver: webdriver.Chrome, script: str) -> None:
    """Wait until a script returns something true."""
    WebDriverWait(driver, WAIT_SECONDS, poll_frequency=0.05).until(
        lambda browser: browser.execute_script(script)
    )


def draw_everything(driver: webdriver.Chrome) -> None:
    """Bring each chart into view once, since charts are drawn when they come near."""
    driver.execute_script(
        "document.querySelectorAll('.plot').forEach((p) => { if (p.dataset.drawn) draw(p); })"
    )


def console_faults(driver: webdriver.Chrome) -> list[dict[str, Any]]:
    """Warnings and errors of the console since the last call."""
    entries = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry for entry in entries if entry["level"] != "INFO"]


def capture(driver: webdriver.Chrome, selector: str, path: Path) -> None:
    """A PNG of one part of the page, whatever is in view."""
    box = driver.execute_script(
        "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}",
        selector,
    )
    clip = {**box, "scale": 1}
    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    path.write_bytes(base64.b64decode(shot["data"]))
