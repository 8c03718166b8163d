"""Every wait between streams in the engine is needed by a scenario: without the wait, a race is found."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from stream_scenarios import SCENARIOS

import lamella_engine
from lamella_testing import run_ranks

_WAITS = {
    *("wait_event", "wait_stream", "synchronize"),
    *("order_gathers_after_compute", "order_gathers_after_updates", "order_after_gather"),
    *("wait_for_shards", "_wait_for_gradients", "_wait_on_host"),
}
_FOLDER = Path(lamella_engine.__file__ or "").parent


@dataclass(frozen=True)
class Site:
    """A call of a wait in the engine's sources.

    Attributes:
        file: Below the package.
        line: The line on which the call begins.
        column: The column in which the call begins.
        function: Qualified name of the function around.
        call: The source of the call.
    """

    file: str
    line: int
    column: int
    function: str
    call: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.call}"


class _Finder(ast.NodeVisitor):
    """Collects the calls of waits in a module, and the functions around them."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._names: list[str] = []
        self.sites: list[Site] = []

    def _visit_scope(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_ClassDef = visit_FunctionDef = _visit_scope  # noqa: N815  ast's names

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        call = ast.unparse(node)
        if name in _WAITS and not call.startswith("torch.cuda."):  # a wait for a device is no wait between streams
            self.sites.append(Site(self._file, node.lineno, node.col_offset, ".".join(self._names), call))


def _sites() -> Iterator[Site]:
    for path in sorted(_FOLDER.rglob("*.py")):
        finder = _Finder(str(path.relative_to(_FOLDER)))
        finder.visit(ast.parse(path.read_text()))
        yield from finder.sites


SITES = list(_sites())


class _Remover(ast.NodeTransformer):
    """Puts None in place of a call."""

    def __init__(self, site: Site) -> None:
        self._place = site.line, site.column

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (node.lineno, node.col_offset) == self._place:
            return ast.copy_location(ast.Constant(None), node)
        self.generic_visit(node)
        return node


def _remove(site: Site) -> None:
    """Let this process run the engine without a wait: the function gets a source's code without the call."""
    path = _FOLDER / site.file
    tree = ast.fix_missing_locations(_Remover(site).visit(ast.parse(path.read_text())))
    module = importlib.import_module(".".join(["lamella_engine", *Path(site.file).with_suffix("").parts]))
    scope: Any = module
    for name in site.function.split("."):
        scope = inspect.getattr_static(scope, name)
    function = inspect.unwrap(scope)
    assert isinstance(function, FunctionType)
    codes = [code for code in _codes(compile(tree, str(path), "exec")) if code.co_qualname == site.function]
    (function.__code__,) = codes


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _finds_race(name: str) -> bool:
    try:
        return bool(SCENARIOS[name]())
    except Exception:  # noqa: BLE001  the scenario's test would fail too
        return True


def scenario_without(site: Site) -> str | None:
    """The first scenario that finds a race, or fails, without a wait; None if the wait is not tested."""

    def first() -> str | None:
        _remove(site)
        return next((name for name in SCENARIOS if _finds_race(name)), None)

    return run_ranks(first, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES, ids=str)
def test_a_scenario_finds_a_race_without_the_wait(site: Site) -> None:
    assert scenario_without(site) is not None


@pytest.mark.slow
def test_every_scenario_is_free_of_races_with_all_waits() -> None:
    assert run_ranks(lambda: [name for name in SCENARIOS if _finds_race(name)], 1) == [[]]
