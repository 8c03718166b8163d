"""One suite, two implementations: what torch's FSDP2 does here, lamella must do with nothing but the import changed.

A test takes `api`, a namespace with `fully_shard` and what goes with it. The run on torch says that the test is right,
the run on lamella that lamella is.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp

import lamella_engine

API = {"torch": torch.distributed.fsdp, "lamella": lamella_engine}

# What lamella lacks: a test, or one case of it, and why it fails. A test that begins to pass turns the suite red until
# its line here goes.
NOT_YET: dict[str, str] = {}


@pytest.fixture(params=API)
def api(request: pytest.FixtureRequest) -> ModuleType:
    return API[request.param]


@pytest.hookimpl(tryfirst=True)  # before -k and --lf take tests out of the list
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    known = set()
    for item in ours:
        case, names_lamella = _case_of(item)
        keys = {case, case.partition("[")[0]} & NOT_YET.keys()
        known |= keys
        if names_lamella and keys:
            item.add_marker(pytest.mark.xfail(strict=True, reason=NOT_YET[max(keys)]))
    files = {item.path.stem for item in ours}
    stale = {key for key in NOT_YET if key.partition("::")[0] in files} - known
    if stale and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"Expected NOT_YET to name tests that exist, got {sorted(stale)}.")


def _case_of(item: pytest.Item) -> tuple[str, bool]:
    """What NOT_YET calls a test, `file::test[case]` without the implementation, and whether it runs on lamella."""
    name, _, case = item.name.rstrip("]").partition("[")
    parts = case.split("-")
    others = "-".join(part for part in parts if part not in API)
    return f"{item.path.stem}::{name}" + (f"[{others}]" if others else ""), "lamella" in parts
