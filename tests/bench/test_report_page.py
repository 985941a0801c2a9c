"""The page in a real browser: nothing fetched, nothing sticks out, no error, and runs that can be stepped through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from support.browser import Browser, Page
from support.counting import counting_engine

from common.bench.metrics import summarise
from common.bench.record import Recorder
from common.bench.report import Picture, Report, Section, Table
from common.bench.report_events import events
from common.bench.report_multiples import multiples
from common.bench.report_page import to_html
from common.stages import STAGES

LENGTHS = [(9, 4), (3, 12), (5, 1), (8, 7), (2, 2), (6, 9), (4, 14), (7, 3)]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
READY = "document.querySelector('.board:not([hidden]) .cursor') !== null"
MAP = "document.querySelectorAll('.board')[1].querySelector('.map').innerHTML"

ROWS = "[...document.querySelectorAll('.board:not([hidden]) tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
DRAWINGS = "[...document.querySelectorAll('.board:not([hidden]) svg:not([hidden]), .panel')]"
BOARDS = "[...document.querySelector('.player').querySelectorAll('.board:not([hidden])')]"
"""Those of the first player that are shown."""
ENDED = f"{BOARDS}.map((board) => board.querySelector('p').textContent.includes('All have ended.'))"
NAMES = f"{BOARDS}.map((board) => board.querySelector('h4').textContent)"
DRAWN = (
    f"Object.fromEntries({BOARDS}"
    + """.map((board) => {
  const width = (kind) => [...board.querySelectorAll(`.map rect[class^="${kind}"]`)]
    .reduce((sum, rect) => sum + rect.width.baseVal.value, 0);
  return [board.querySelector('h4').textContent, {free: width('free'), r: width('r'), h: width('h')}];
}))"""
)
FAINT = r"""(() => {
  const part = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * part(r / 255) + .7152 * part(g / 255) + .0722 * part(b / 255);
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const ground = (e) => {
    const color = rgb(getComputedStyle(e).backgroundColor);
    return color.length < 4 || color[3] > 0 ? color : ground(e.parentElement);
  };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.textContent.trim());
  return [...document.querySelectorAll('body *:not(script, style, noscript, svg *)')].filter(own).filter((e) => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5;
  }).map((e) => `${e.tagName} ${e.textContent.slice(0, 30)}`);
})()"""
"""Elements with text whose contrast with their ground is below 4.5 (WCAG AA)."""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two reports, with everything that a report can hold; every stage has run."""
    runs = {}
    for stage in STAGES:
        engine, requests = counting_engine(stage, LENGTHS, kv_tokens=64)
        runs[stage] = Recorder(engine).run(requests)
    steps = {name: events(run) for name, run in runs.items()}
    figure = Figure()
    figure.subplots().plot([1, 2, 3])
    wide = Table(["stage", *(f"column {i}" for i in range(14))], [["</script><b>x", *["1,234.5 ms"] * 14]])
    overview = (multiples("Chats", "few", {name: summarise(run) for name, run in runs.items()}),)
    first = Report("First", "A lead.", [
        Section("A table", ("Words.",), wide, (Picture("curve", figure, "it goes up"),)),
        Section("Steps", (), runs=steps), Section("Folded", folded=[("Why?", "x" * 300)]),
    ], "x" * 300, {}, overview)  # fmt: skip
    engine, requests = counting_engine("stage3_paged", LENGTHS, kv_tokens=4096)
    roomy = {"stage3_paged": events(Recorder(engine).run(requests))}
    sections = [Section("Nothing but words", ("Words.",)), Section("Much memory", runs=roomy)]
    second = Report("Second", "Another.", sections)
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(to_html([first, second]), encoding="utf-8")
    return path


@pytest.fixture(params=[(size, dark) for size in SIZES for dark in (False, True)],
                ids=lambda p: f"{p[0]}-{'dark' if p[1] else 'light'}")  # fmt: skip
def seen(request: pytest.FixtureRequest, browser: Browser, page_file: Path) -> Iterator[Page]:
    """The page at one size in one scheme."""
    size, dark = request.param
    with browser.open(page_file.as_uri(), *SIZES[size], dark=dark) as page:
        page.wait(READY)
        yield page


@pytest.fixture
def page(browser: Browser, page_file: Path) -> Iterator[Page]:
    """The page, on a phone."""
    with browser.open(page_file.as_uri(), *SIZES["phone"]) as page:
        page.wait(READY)
        yield page


def test_it_stands_alone_and_fits(seen: Page, page_file: Path) -> None:
    assert seen.errors == []
    assert seen.requests == [page_file.as_uri()], "nothing is fetched"
    assert seen.eval("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    assert seen.eval(f"{DRAWINGS}.every((drawing) => drawing.clientWidth > 100)")


def test_text_can_be_read_on_its_ground(seen: Page) -> None:
    """In both schemes."""
    low = seen.eval(FAINT)
    assert low == []


def test_buttons_step(page: Page) -> None:
    """On, back, and by the arrow keys; the picture, its words and what the slider says go along."""
    at = page.eval("document.querySelector('[type=range]').valueAsNumber")
    first, words = page.eval(MAP), _words(page)
    page.click(".on")
    assert page.eval(MAP) != first
    assert _words(page) != words
    assert f"Forward {at + 2} of" in _words(page)
    assert page.eval("document.querySelector('.map:not([hidden])').ariaLabel").endswith(_words(page))
    page.click(".back")
    assert (page.eval(MAP), _words(page)) == (first, words)
    page.eval("document.querySelector('[type=range]').focus()")
    page.press("ArrowRight")
    assert page.eval("document.querySelector('[type=range]').ariaValueText").startswith(
        f"forward {at + 2} of"
    )
    page.press("End")
    assert page.eval(f"{ENDED}.some((ended) => !ended)"), "the longest is only at its last forward"
    page.press("Home")
    assert "Forward 1 of" in _words(page)
    assert page.errors == []


def test_it_plays_to_the_end(page: Page) -> None:
    page.click(".play")
    page.wait("document.querySelector('[type=range]').valueAsNumber > 12")
    assert page.eval("document.querySelector('.play').textContent") == "Pause"
    page.click(".play")
    assert page.eval("document.querySelector('.play').textContent") == "Play"


def test_the_map_is_what_was_recorded(page: Page) -> None:
    """The widths drawn for a forward add up to the slots that were live and reserved, in every stage."""
    for forward in (0, 5, 11):
        _go(page, forward)
        for name, drawn in page.eval(DRAWN).items():
            recorded = _events(page)[name]
            at = min(forward, len(recorded["live"]) - 1)
            slots = [
                round(width / drawn["free"] * recorded["capacity"]) for width in (drawn["r"], drawn["h"])
            ]
            assert slots == [recorded["live"][at], recorded["reserved"][at] - recorded["live"][at]]


def test_memory_that_nobody_needed_is_left_out(page: Page) -> None:
    words = page.eval("document.querySelectorAll('.player')[1].querySelector('small').textContent")
    first, of = (int(word.replace(",", "")) for word in words.split() if word[0].isdigit())
    assert (of, first % 4) == (4096, 0)
    assert first <= 4 * (64 // 4 + 1), "four places, at most 64 tokens in each"
    assert page.eval("document.querySelectorAll('.player')[0].querySelector('small')") is None


def test_a_click_into_the_history_goes_there(page: Page) -> None:
    page.click(".board:not([hidden]) .history")
    middle, of = page.eval(
        "document.querySelector('.board:not([hidden]) p').textContent.match(/\\d+/g).slice(0, 2).map(Number)"
    )
    assert abs(middle - of / 2) <= 1


def test_runs_are_chosen_and_go_by_the_clock(page: Page) -> None:
    assert page.eval(NAMES) == [name for name in STAGES if name != "stage1_naive"], "those that keep K/V"
    page.click("[name='0']")
    assert page.eval(NAMES) == list(STAGES)
    page.click(".clock")
    page.eval("document.querySelector('[type=range]').focus()")
    page.press("End")
    assert page.eval("document.querySelector('output').textContent").endswith(" s")
    assert page.eval(f"{ENDED}.every(Boolean)"), "at the last second of the slowest"
    assert page.errors == []


def test_a_table_says_what_the_map_shows(page: Page) -> None:
    page.click(".board:not([hidden]) summary")
    page.wait("document.querySelector('.board:not([hidden]) tbody tr')")
    rows = page.eval(ROWS)
    at = page.eval("document.querySelector('[type=range]').valueAsNumber")
    reserved = _events(page)["stage2_kvcache"]["reserved"][at]
    assert sum(int(row[3]) for row in rows) == reserved
    _go(page, 0)
    assert page.eval(ROWS) != rows, "it goes along"


def test_dark_and_light_by_hand(seen: Page) -> None:
    """The button goes against the system, and back."""
    ground = "getComputedStyle(document.body).backgroundColor"
    before = seen.eval(ground)
    seen.click("#theme")
    between = seen.eval(ground)
    seen.click("#theme")
    assert before != between
    assert seen.eval(ground) == before


def test_without_script_the_figures_are_there(browser: Browser, page_file: Path) -> None:
    with browser.open(page_file.as_uri(), *SIZES["phone"], script=False) as page:
        text = page.eval("document.body.innerText")
        assert "Stepping through the runs needs JavaScript" in text
        assert "5 prefix sharing" in text
        assert page.eval("document.querySelector('#theme').hidden")


def _words(page: Page) -> str:
    return page.eval("[...document.querySelectorAll('.board:not([hidden]) p')][0].textContent")


def _go(page: Page, forward: int) -> None:
    page.eval(f"(s => {{ s.value = {forward}; s.oninput(); }})(document.querySelector('[type=range]'))")


def _events(page: Page) -> dict:
    return page.eval("JSON.parse(document.querySelector('.player script').textContent)")
