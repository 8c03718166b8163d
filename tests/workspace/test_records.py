"""Measurements have records: cited commits exist, and the README's figures stand in the linked pages."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
COMMIT = re.compile(r"`((?=[a-f]*\d)[0-9a-f]{7,40})(?:-dirty)?`")
RECORD = re.compile(r"\]\((docs/(?:benchmarks/\d|reference/gpu-status)[\w-]*\.md)")
# "91.0 %", "8 to 34 %", "33.8 GiB", "1.09 to 1.23 times", "54 passed": a figure, or two, and the unit.
FIGURE = re.compile(r"(\d[\d.,]*)(?: to (\d[\d.,]*))? (?:%|GiB|times|passed|failed)")


def _commits(text: str) -> set[str]:
    return set(COMMIT.findall(text))


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a page; a list's item is a paragraph, and a table belongs to the paragraph below."""
    joined = re.sub(r"\|\n\n", "|\n", text)
    return re.split(r"\n\n|\n(?=\* )", joined)


def _figures(paragraph: str) -> set[str]:
    text = paragraph.replace("*", "")
    return {figure for pair in FIGURE.findall(text) for figure in pair if figure}


def _missing(paragraph: str, records: str) -> set[str]:
    """The figures of a paragraph that no record has as separate numbers."""
    numbers = {number.rstrip(".,") for number in re.findall(r"\d[\d.,]*", records)}
    return _figures(paragraph) - numbers


def test_every_commit_that_a_page_cites_is_in_the_history() -> None:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    if answer != "false":
        pytest.skip("The checkout has no history: a shallow clone, or no repository.")
    history = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commits = history.stdout.split()
    cited = {(page.relative_to(ROOT), commit) for page in PAGES for commit in _commits(page.read_text())}
    assert len(cited) > 50
    assert not [pair for pair in sorted(cited) if not any(commit.startswith(pair[1]) for commit in commits)]


@pytest.mark.parametrize(
    "paragraph", [text for text in _paragraphs(README) if _figures(text)], ids=lambda text: text.strip()[:30]
)
def test_a_figure_of_the_readme_stands_in_a_record_that_its_paragraph_links(paragraph: str) -> None:
    pages = RECORD.findall(paragraph)
    assert pages, "figures without a record"
    assert not _missing(paragraph, "\n".join((ROOT / page).read_text() for page in pages))


def test_a_commit_or_figure_that_is_invented_is_noticed() -> None:
    assert _commits("at `8abf6c1`, `70d18b3-dirty` and `deadbeef`, on `1234567`") == {"8abf6c1", "70d18b3", "1234567"}
    assert _missing("**91.0 %**, in 8 to 34 % less memory; 135 passed", "| 91.0% | 8 | 34.5 | 1,135 |") == {"34", "135"}
