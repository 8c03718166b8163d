"""One suite, two implementations: lamella must pass the tests passed by FSDP2, with a changed import alone.

A test takes `api`, a namespace with `fully_shard` and its companions. The run on torch shows that the test is right,
the run on lamella that lamella is right. Known gaps are in `not_yet.py`. Both run on CPU over gloo, and over NCCL on
two GPUs, or on four where a test is marked `four_ranks`. Torch's runs on CPU, marked `peer`, depend on torch and these
tests alone: `./dev fsdp2` after a change of either.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp
from fsdp2_models import Where
from not_yet import NOT_YET

import lamella_engine

API = {
    "torch": torch.distributed.fsdp,
    "lamella": lamella_engine,
    "torch_nccl": torch.distributed.fsdp,
    "lamella_nccl": lamella_engine,
}

IS_OLD = torch.__version__ < "2.13"


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.peer), "lamella", "torch_nccl", "lamella_nccl"])
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(Where, "device", "cuda" if request.param.endswith("_nccl") else "cpu")
    monkeypatch.setattr(Where, "most_ranks", _most_ranks(request.node))
    return API[request.param]


@pytest.hookimpl(tryfirst=True)  # before -k and --lf take tests out of the list
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    matched_names = set()
    for item in ours:
        test, case, implementation = _name_of(item)
        if implementation.endswith("_nccl"):
            item.add_marker(f"gpu{_most_ranks(item)}")
        if IS_OLD and API.get(implementation) is torch.distributed.fsdp:
            item.add_marker(pytest.mark.xfail(strict=False, reason="older than the suite"))
        lacks = NOT_YET.get(item.path.stem, {})
        for key in {f"{test}[{case}]", test} & lacks.keys():
            matched_names.add((item.path.stem, key))
            if API.get(implementation) is lamella_engine:
                item.add_marker(pytest.mark.xfail(strict=True, reason=lacks[key]))
    files = {item.path.stem for item in ours}
    stale = {(file, key) for file in files for key in NOT_YET.get(file, {})} - matched_names
    if stale and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"Expected not_yet.py to name tests that exist, got {sorted(stale)}.")


def _most_ranks(item: pytest.Item) -> int:
    return 4 if item.get_closest_marker("four_ranks") else 2


def _name_of(item: pytest.Item) -> tuple[str, str, str]:
    """A test's name, its case, and the implementation it runs on: "test_x[torch-case]" is made of the three."""
    test, _, parameters = item.name.removesuffix("]").partition("[")
    parts = parameters.split("-")
    case = "-".join(part for part in parts if part not in API)
    return test, case, next((part for part in parts if part in API), "")
