"""The docs as a site (`make docs`) open from the disk, ask nothing of anybody, and can be searched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, program

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(program() is None, reason="needs Chromium (Debian, Ubuntu: apt-get install chromium)"),
]
SITE = Path(__file__).parents[2] / "build" / "docs"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (SITE / "index.html").is_file():
        pytest.skip("needs the site: make docs")
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.mark.parametrize("page", ["index", "reward_does_not_rise", "reference", "source/AGENTS"])
def test_a_page_opens_from_the_disk_and_asks_nothing_of_anybody(browser: Browser, page: str) -> None:
    browser.open((SITE / f"{page}.html").as_uri())
    assert browser.requests
    assert [request for request in browser.requests if not request.startswith(("file:", "data:", "about:"))] == []
    assert browser.complaints == []


def test_the_search_finds_a_setting_and_leads_to_its_page(browser: Browser) -> None:
    browser.open((SITE / "index.html").as_uri())
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.type_text("max-mean-uses")
    browser.until("document.querySelectorAll('.md-search-result__link').length > 0")
    found = browser.run("[...document.querySelectorAll('.md-search-result__link')].map((link) => link.pathname)")
    assert found[0].endswith("/reference.html")
    assert not any("/source/" in path for path in found)
