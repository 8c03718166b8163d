"""Pages of the documentation: short enough to be read, and each in the navigation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LONG = {"reference", "design", "explanation", "benchmarks"}  # for looking up, or for a contributor's long evening
MOST_WORDS = 900
PAGES = sorted(DOCS.rglob("*.md"))


def _num_words(text: str) -> int:
    """Words of a page as `wc -w` counts them: code and tables included."""
    return len(text.split())


def _navigation() -> list[str]:
    """Pages in the navigation of mkdocs.yml, in order, as paths below `docs`."""
    settings = (ROOT / "mkdocs.yml").read_text()
    section = settings.partition("\nnav:\n")[2].partition("\n\n")[0]
    return re.findall(r"^ *- (?:[^:\n]+: )?(\S+\.md)$", section, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.relative_to(DOCS).parts[0] not in LONG],
    ids=lambda page: str(page.relative_to(DOCS)),
)
def test_a_page_for_users_is_short(page: Path) -> None:
    num_words = _num_words(page.read_text())
    assert num_words <= MOST_WORDS, f"Expected at most {MOST_WORDS} words, got {num_words}. Split the page by question."


def test_the_navigation_has_every_page_once() -> None:
    pages = _navigation()
    assert sorted(pages) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_records_are_listed_in_their_order() -> None:
    records = [page for page in _navigation() if page.startswith("benchmarks/0")]
    assert len(records) >= 19
    assert records == sorted(records)
