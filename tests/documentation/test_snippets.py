"""The code in the documentation runs, and its assertions hold."""

import re
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  Every optimizer imports torch._dynamo.
import torch.distributed as dist

import lamella_checkpoint  # noqa: F401  Here and in the next line: once in the parent, not in every forked rank.
from lamella_testing import run_ranks
from lamella_testing.forked_writers import forked_writers

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "docs/how-to/train-adapters.md",  # needs a run's adapters: packages/lamella/tests/model/test_adapters.py
    "docs/how-to/move-a-megatron-lm-script.md",  # needs megatron-core: packages/megatron/tests/mcore/test_pages.py
    "packages/megatron/README.md",  # needs megatron-core, and a model of the reader's
}
PAGES = sorted(
    page
    for pattern in ("README.md", "docs/**/*.md", "packages/*/README.md")
    for page in ROOT.glob(pattern)
    if "```python\n" in page.read_text() and str(page.relative_to(ROOT)) not in ELSEWHERE
)
# Pages whose code makes process groups by itself.
WITHOUT_RANKS = {"docs/how-to/estimate-memory.md"}
# Pages whose text speaks of several ranks. The statements of all other pages hold on a single rank.
NUM_RANKS = {
    "README.md": 2,
    "docs/tutorial.md": 2,
    "docs/explanation/two-layouts.md": 2,
    "docs/how-to/choose-a-float8-recipe.md": 2,
    "docs/how-to/choose-a-zero-stage.md": 4,
    "docs/how-to/cut-layers-and-sequences.md": 2,
    "docs/how-to/drive-a-unit-by-hand.md": 2,
    "docs/how-to/find-a-nan.md": 2,
    "docs/how-to/find-an-order-divergence.md": 2,
    "docs/how-to/find-exposed-communication.md": 2,
    "docs/how-to/gather-weights-in-float8.md": 2,
    "docs/how-to/overlap-expert-parallel-communication.md": 2,
    "docs/how-to/order-pipeline-stages.md": 2,
    "docs/how-to/overlap-layers-of-your-own.md": 2,
    "docs/how-to/resume-elsewhere.md": 2,
    "docs/how-to/shard-a-mamba-model.md": 2,
    "docs/how-to/shard-a-whole-model.md": 2,
}


def _code(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE))


def _run_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks of `run_ranks` have a process group before the page asks for a group.
    monkeypatch.setattr(dist, "init_process_group", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    _execute(page)


def _run_page_alone(page: Path) -> None:
    dist.destroy_process_group()
    _execute(page)


def _execute(page: Path) -> None:
    exec(compile(_code(page), page, "exec"), {"__name__": "__main__"})


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11, of every schedule
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_on_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = str(page.relative_to(ROOT))
    monkeypatch.chdir(tmp_path)
    with forked_writers():
        if name in WITHOUT_RANKS:
            run_ranks(lambda: _run_page_alone(page), 1)
        else:
            run_ranks(lambda: _run_page(page, monkeypatch), NUM_RANKS.get(name, 1))


def test_documentation_pages_listed_with_several_ranks_exist() -> None:
    assert {str(page.relative_to(ROOT)) for page in PAGES} >= NUM_RANKS.keys()
