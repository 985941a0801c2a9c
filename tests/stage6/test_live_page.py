"""The page at `/live` in a real browser: a click, a stream, and the grid changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.live_server import SETTINGS, serve

KEY = "a key"
HELD = "document.querySelectorAll('#grid .held, #grid .shared').length"


@pytest.fixture(scope="module")
def server():
    """A server with a key, a small pool and a model that takes its time."""
    settings = replace(SETTINGS, live=True, api_keys=(KEY,))
    with serve(settings, kv_tokens=1024, max_num_seqs=8, max_model_len=512) as live:
        live.lm.delay = 0.005
        yield live


@pytest.fixture(scope="module")
def page(browser, server):
    """The page with its key typed in and its stream open, for all tests; without an error at the end."""
    with browser.open(f"{server.base}/live", 1280, 900) as page:
        page.wait("!document.querySelector('#door').hidden")
        page.errors.clear()  # the 401 that asked for the key
        page.click("#key")
        page.type(KEY)
        page.click("#door button")
        page.wait(
            "document.body.classList.contains('open') && document.querySelectorAll('#grid div').length == 256"
        )
        yield page
        assert page.errors == []
        assert all(url.startswith(server.base) and KEY not in url for url in page.requests)


def text(page, selector):
    """What stands there."""
    return page.eval(f"document.querySelector({selector!r}).textContent")


def press(page, button):
    """Click, and wait until all of it has been answered."""
    page.click(button)
    page.wait(f"document.querySelector('{button}').disabled")


def test_chat_fills_the_grid(page, server):
    """The answer appears as it is made, its blocks are taken meanwhile, and stay cached."""
    assert page.eval(HELD) == 0
    marker = server.lm.say("Hello the AB CD " * 8)
    page.click("#question")
    page.type(f"What? {marker}")
    page.click("#ask button")
    page.wait(f"{HELD} > 4 && document.querySelector('.turn.model').textContent.startsWith('Hello')")
    assert text(page, "#slots .busy small")
    assert text(page, "#running") == "1/8"
    page.wait(f"{HELD} == 0 && document.querySelectorAll('#grid .cached').length > 4")
    assert text(page, ".turn.model") == "Hello the AB CD " * 8
    assert "cached" in page.eval("document.querySelector('#grid').getAttribute('aria-label')")


def test_a_crowd_fills_places_and_queue(page):
    """24 requests in 8 places; as some are answered others leave the queue, and Stop hangs up on the rest."""
    press(page, "#crowd")
    page.wait("document.querySelectorAll('#slots .busy').length == 8")
    page.wait("document.querySelectorAll('#queue li').length > 3")
    page.wait("Number(document.querySelector('#rate').textContent) > 10")
    page.wait("parseInt(document.querySelector('.card summary').textContent.split(': ')[1]) >= 8", 20)
    assert len(text(page, ".card li span")) > 20
    page.click("#stop")
    page.wait("!document.querySelector('#crowd').disabled")
    page.wait("document.querySelectorAll('#slots .busy, #queue li').length == 0")
    page.wait("document.querySelector('#words').textContent.includes('blocks held')")


def test_agents_share_their_rules(page):
    """One system prompt: its blocks are striped, and later prompts come from the cache for the most part."""
    press(page, "#agents")
    page.wait("document.querySelectorAll('#grid .shared').length > 10", 10)
    page.wait("parseInt(document.querySelector('#hits').textContent) > 40", 10)
    page.click("#slots .busy button")
    page.wait("document.querySelectorAll('#grid .dim').length > 0")
    page.click("#stop")
    page.wait("!document.querySelector('#agents').disabled")


def test_beams_copy_on_write_slowly(page):
    """At a pace that the slider sets; Stop hangs up, and everything is free again."""
    page.eval("document.querySelector('#pace').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    page.wait(
        "document.querySelector('#pace-words').textContent == '0.15 s after each step' && seen.pace == 0.15"
    )
    press(page, "#beams")
    page.wait("Number(document.querySelector('#copies').textContent) > 0", 10)
    assert "is copied to" in text(page, "#log")
    assert page.eval("document.querySelectorAll('#grid .shared').length") > 0
    page.click("#stop")
    page.wait(f"!document.querySelector('#beams').disabled && {HELD} == 0")
    page.eval("document.querySelector('#pace').focus()")
    page.press("Home")
    page.wait("document.querySelector('#pace-words').textContent == 'full speed' && seen.pace == 0")


@pytest.mark.parametrize(("number", "words"), [("2", "slots reserved"), ("1", "keeps no K/V")])
def test_stages_without_blocks(browser, number, words):
    """Stage 2 shows its slab, stage 1 says that there is nothing to show; what it cannot do it says."""
    with (
        serve(replace(SETTINGS, live=True), number, max_num_seqs=4) as live,
        browser.open(f"{live.base}/live", 390, 844, dark=True) as page,
    ):
        live.lm.delay = 0.01
        page.wait("document.body.classList.contains('open')")
        page.click("#question")
        page.type("Hi")
        page.click("#ask button")
        page.wait("document.querySelectorAll('#slots .busy').length == 1")
        page.wait(f"document.querySelector('#memory-words').textContent.includes('{words}')")
        assert bool(page.eval(HELD)) == (number == "2")
        assert page.eval("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []
        live.lm.delay = 0.0
        page.click("#beams")
        page.wait("document.querySelector('#trouble').textContent.includes('beam')")
