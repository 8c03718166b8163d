"""The comparison with FSDP2 leaves nothing out, and cites existing tests."""

import inspect
import re
from pathlib import Path

import pytest
import torch.distributed.fsdp as fsdp2

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/fsdp2.md").read_text()
FUNCTIONS = ["register_fsdp_forward_method", "share_comm_ctx"]
METHODS = [name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")]
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize("name", inspect.signature(fsdp2.fully_shard).parameters)
def test_every_argument_has_a_row(name: str) -> None:
    assert re.search(rf"^\| `{name}`", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("name", [*METHODS, *FUNCTIONS])
def test_every_method_and_function_has_a_row(name: str) -> None:
    assert re.search(rf"^\| `{name}\(", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("path", "test"), TESTS, ids=lambda part: Path(part).stem)
def test_a_test_that_is_named_exists(path: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / path).read_text()


def test_every_row_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert len(rows) > len(METHODS)
    assert not [row for row in rows if not re.search(r"::\w+` \|$", row)]
