"""The live page in a real browser: what it shows, without any console error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.page.chromium import Browser, chromium, find_chromium
from tests.waiting import eventually
from triptych import Driver

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is here")

STATE = "document.querySelector(`.row[aria-label^='{name},'] .state`)?.textContent"
LANE = "document.querySelector(`.chip[title='{name}']`)?.closest('.panel').id"


@pytest.fixture(scope="module")
def slow() -> Iterator[Site]:
    """A pipeline whose answers take long enough to be watched."""
    with Driver("hash-lm", hash_step_ms=5, num_pages=300) as driver, site(driver.run_dir) as api:
        api.driver = driver
        yield api


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path) as browser:
        yield browser
        assert browser.complaints == []


def test_request_moves_through_the_panels(slow: Site, browser: Browser) -> None:
    assert slow.driver is not None
    browser.open(slow.url + "/")
    browser.wait_for("document.querySelector('#status').textContent === 'healthy'")
    stream = slow.driver.submit("hello", request_id="seen", max_tokens=4000)
    browser.wait_for(f"{STATE.format(name='seen')} === 'decode'")
    assert browser.run(LANE.format(name="seen")) == "execute"
    browser.wait_for("document.querySelector('#pages').getAttribute('aria-label').includes('by 1 requests')")
    assert browser.run("document.querySelector('#steps').getAttribute('aria-label').startsWith('the last ')")
    assert browser.run("[...document.querySelectorAll('.panel dl')].every((list) => list.children.length > 4)")
    stream.abort()
    browser.wait_for(f"{STATE.format(name='seen')} === 'aborted'")
    slow.driver.generate("hello", request_id="done", max_tokens=30)
    browser.wait_for(f"{STATE.format(name='done')} === 'finished'")
    assert browser.run(LANE.format(name="done")) == "summarize"
    widths = (
        "[...document.querySelectorAll(`.row[aria-label^='done,'] .bar i`)].map((part) => parseFloat(part.style.width))"
    )
    assert sum(browser.run(widths)) == pytest.approx(100, abs=0.5)


def test_key_is_asked_for_and_sent_only_in_a_header(pipeline: Driver, tmp_path: Path) -> None:
    with site(pipeline.run_dir, api_key="right") as api, chromium(tmp_path) as browser:
        browser.open(api.url + "/")
        for key in ("wrong", "right"):
            browser.wait_for("document.querySelector('#key-dialog').open")
            browser.run(f"document.querySelector('#key').value = '{key}'")
            browser.run("document.querySelector('#key-form').requestSubmit()")
        browser.wait_for("document.querySelector('#status').textContent === 'healthy'")
        assert browser.run("location.href") == api.url + "/"
        addresses = browser.run("performance.getEntries().map((entry) => entry.name).join()")
        assert "right" not in addresses
        assert all("401" in complaint for complaint in browser.complaints)  # the browser's own line for each


def test_page_can_be_used_by_keyboard(slow: Site, browser: Browser) -> None:
    assert slow.driver is not None
    streams = [slow.driver.submit("hello", request_id=name, max_tokens=4000) for name in ("up", "down")]
    browser.open(slow.url + "/")
    browser.wait_for("document.querySelectorAll('.row:not([data-over])').length === 2")
    browser.run("document.querySelector('.row').focus()")
    chosen = "document.activeElement.getAttribute('aria-label').split(',')[0]"
    assert browser.run(chosen) == "up"
    browser.press("ArrowDown", code=40)
    browser.wait_for(f"{chosen} === 'down'")
    browser.wait_for("document.querySelector('.chip.mine')?.title === 'down'")
    browser.press("Escape", code=27)
    browser.wait_for("!document.body.classList.contains('chosen')")
    for stream in streams:
        stream.abort()
        stream.result(20)


def test_page_fits_a_phone_and_respects_reduced_motion(slow: Site, browser: Browser) -> None:
    assert slow.driver is not None
    browser.open(slow.url + "/", width=360, height=740, prefers_reduced_motion="reduce", prefers_color_scheme="dark")
    for _ in range(3):
        slow.driver.generate("hello", max_tokens=20)
    browser.wait_for("document.querySelectorAll('.row').length >= 3")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("document.getAnimations().length") == 0
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 17, 24)"


def test_request_ids_are_shown_as_plain_text(slow: Site, browser: Browser) -> None:
    assert slow.driver is not None
    name = "<img/src=x/onerror=document.title=1>"
    browser.open(slow.url + "/")
    slow.driver.generate("hello", request_id=name, max_tokens=3)
    browser.wait_for(f"[...document.querySelectorAll('.row .id')].some((cell) => cell.textContent === '{name}')")
    assert browser.run("document.querySelectorAll('img').length") == 0


def test_pause_stops_the_updates(slow: Site, browser: Browser) -> None:
    browser.open(slow.url + "/")
    browser.wait_for("Number(document.body.dataset.frames) > 1")
    browser.run("document.querySelector('#pause').click()")
    eventually(lambda: slow.gateway.feed._poller is None)
    browser.run("document.querySelector('#pause').click()")
    eventually(lambda: slow.gateway.feed._poller is not None)
