"""The page of a report as a real browser shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.report import write_report
from common.rollout_log import RolloutLog
from tests.integration.browser import Page, browser, find_browser
from tests.unit.synthetic_run import a_group, write_run

pytestmark = pytest.mark.slow
ATTACK = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
LAPTOP = 1280

OUTSIDE = """
[...document.querySelectorAll('main *:not(svg *)')]
    .filter(element => element.getBoundingClientRect().right > innerWidth + 0.5)
    .map(element => element.outerHTML.slice(0, 100))
"""
PICTURES = """
[...document.querySelectorAll('.panel svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    const width = path => path.getBoundingClientRect().width;
    const lines = [...svg.querySelectorAll('path')].filter(path => width(path) > 9);
    return [box.width, box.height, lines.length, svg.textContent.trim().length];
})
"""
INK = """
(() => {
    const rgb = (element, key) => getComputedStyle(element)[key].match(/[0-9]+/g).map(Number);
    return [rgb(document.body, 'backgroundColor'), rgb(document.body, 'color'),
            rgb(document.querySelector('.panel svg text'), 'fill')];
})()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of a run whose model writes what it should not, and long words."""
    run_dir = tmp_path_factory.mktemp("reported")
    write_run(run_dir, batches=30)
    log = RolloutLog(run_dir, 2**30)
    texts = [ATTACK, "x" * 3000, "cut \x00\x1b[2J\u202e here"]
    for version, fate in ((28, "trained"), (29, "filtered"), (30, "failed")):
        group = a_group(version, texts=texts, fate=fate, reason="</h3>" + ATTACK, prompt=ATTACK)
        log.write(group)
    return (write_report(run_dir) / "index.html").as_uri()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed; Debian: apt-get install chromium")
    with browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("width", [LAPTOP, 900])
def test_the_page_fits_its_window_and_every_plot_is_drawn(
    page: Page, address: str, width: int
) -> None:
    page.open(address, width)
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(OUTSIDE) == []
    pictures = page.value(PICTURES)
    assert len(pictures) == 12
    for wide, high, lines, letters in pictures:
        assert wide > 200 and high > 120 and lines > 1 and letters > 20


def test_the_browser_has_nothing_to_complain_of_and_fetches_nothing_else(
    page: Page, address: str
) -> None:
    page.said.clear()
    page.asked.clear()
    page.open(address, LAPTOP)
    page.value("document.body.offsetHeight")
    assert page.said == []
    assert page.asked == [address]


def test_what_a_model_wrote_is_shown_and_never_run(page: Page, address: str) -> None:
    page.open(address, LAPTOP)
    assert page.value("document.title").endswith(": report")
    assert page.value("document.querySelectorAll('script, img').length") == 0
    shown = page.value("[...document.querySelectorAll('.sample pre')].map(e => e.textContent)")
    assert ATTACK in shown
    assert not any(sign in text for text in shown for sign in "\x00\x1b\u202e")


def test_the_page_is_readable_in_the_dark(page: Page, address: str) -> None:
    def light(dark: bool) -> list[float]:
        page.open(address, LAPTOP, dark)
        return [sum(colour[:3]) / 765 for colour in page.value(INK)]

    background, text, plot = light(dark=False)
    assert background > 0.9 and text < 0.2 and plot < 0.2
    background, text, plot = light(dark=True)
    assert background < 0.2 and text > 0.8 and plot > 0.8
