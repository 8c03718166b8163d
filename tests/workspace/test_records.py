"""Measurements have records: cited commits exist, and figures of summaries stand in the records that they link."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs" / "benchmarks" / "README.md"
PAGES = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
COMMIT = re.compile(r"`((?=[a-f]*\d)[0-9a-f]{7,40})(?:-dirty)?`")
RECORD = re.compile(r"\]\((docs/(?:benchmarks/\d|reference/gpu-status)[\w-]*\.md)")
# "91.0 %", "8 to 34 %", "33.8 GiB", "1.09 to 1.23 times", "54 passed": a figure, or two, and the unit.
FIGURE = re.compile(r"(\d[\d.,]*)(?: to (\d[\d.,]*))? (?:%|GiB|times|passed|failed)")
DATE = re.compile(r"\d{4}-\d\d-\d\d")


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
    """The figures of a paragraph that no record has, as numbers of their own."""
    return _figures(paragraph) - _numbers(records)


def _numbers(text: str) -> set[str]:
    return {number.rstrip(".,") for number in re.findall(r"(?<![\w.])\d[\d.,]*", text)}


def _rows(page: str) -> list[str]:
    """The rows with figures of a page's tables of results: the tables that name date, commit, hardware and record."""
    tables = re.findall(
        r"^\|[^\n]*\| date, commit, hardware \| record \|\n\|[-:|]+\n((?:\|.*\n)+)", page, flags=re.MULTILINE
    )
    return [row for rows in tables for row in rows.splitlines()]


def _missing_of_a_row(row: str, record: str) -> set[str]:
    """The figures, the date, the commit and the hardware of a row of results that its record does not have."""
    *cells, origin, _ = row.strip("|").split("|")
    date, commit, hardware = origin.strip().replace("`", "").split(", ")
    facts = {fact for fact in (date, commit, hardware) if fact.lower() not in record.lower()}
    return facts | (_numbers("|".join(cells)) - _numbers(record))


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


@pytest.mark.parametrize("row", _rows(RESULTS.read_text()), ids=lambda row: row[2:40])
def test_a_row_of_results_is_a_copy_of_its_record(row: str) -> None:
    [record] = re.findall(r"\]\((\d[\w-]*\.md)(?:#[\w-]*)?\) \|$", row)
    assert DATE.search(row) and _commits(row)
    assert not _missing_of_a_row(row, (RESULTS.parent / record).read_text())


def test_every_table_of_results_has_rows_to_check() -> None:
    text = RESULTS.read_text()
    tables = re.findall(r"^\|[-:|]+$", text, flags=re.MULTILINE)
    assert len(tables) == text.count("| date, commit, hardware | record |") >= 7
    assert len(_rows(text)) >= 20


def test_the_page_of_results_lists_every_record() -> None:
    listed = re.findall(r"^- \[.*\]\((\d{4}-[\w-]+\.md)\)$", RESULTS.read_text(), flags=re.MULTILINE)
    assert listed == sorted(path.name for path in RESULTS.parent.glob("0*.md"))


def test_a_commit_or_figure_that_is_invented_is_noticed() -> None:
    assert _commits("at `8abf6c1`, `70d18b3-dirty` and `deadbeef`, on `1234567`") == {"8abf6c1", "70d18b3", "1234567"}
    assert _missing("**91.0 %**, in 8 to 34 % less memory; 135 passed", "| 91.0% | 8 | 34.5 | 1,135 |") == {"34", "135"}
    row = "| 8 billion | 91.0 %, 50.8 GiB | 2026-11-22, `2402c0d`, 4 x NVIDIA H200 | [0008](0008.md) |"
    record = "2026-11-22, `2402c0d`, 4 x NVIDIA H200; 8 billion, | 91.0% | 50.8 |"
    assert _missing_of_a_row(row, record) == set()
    assert _missing_of_a_row(row, record.replace("50.8", "50.9").replace("2402c0d", "e12da58")) == {"50.8", "2402c0d"}
