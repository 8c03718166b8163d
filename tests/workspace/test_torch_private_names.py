"""The table of torch's private names lists exactly the names used by a package."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "torch-private-names.md"
FOREIGN = {
    *("_asdict", "_replace", "_shard_order"),  # named tuples', Megatron-FSDP's
    *(
        "_no_split_modules",
        "_supports_attention_backend",
        "_init_weights",
        "_attn_implementation",
        "_is_stateful",
    ),  # transformers'
    *("_forward_attention", "_forward_mlp", "_forward_pre_mlp_layernorm"),  # megatron-core's, as the next
    *("_get_embeddings", "_concat_embeddings", "_postprocess"),
    *("_maybe_unflatten_for_moe", "_maybe_reflatten_from_moe", "_comm_manager"),
}
Names = set[tuple[str, str]]  # package, torch's name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _chain(node: ast.expr) -> tuple[str, ...]:
    """The parts of `a.b.c`; empty for an expression other than a chain of names."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)):
        return (*before, node.attr)
    return ()


def _imports(tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """Each import as the local name, the full name, and whether the full name was taken from a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top, False
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}", True) for alias in node.names)


def _through_modules(tree: ast.Module) -> Iterator[str]:
    """Private names imported from torch or at the end of a chain, up to the name after the last private part."""
    imported = {local: (full, is_taken) for local, full, is_taken in _imports(tree)}
    for full, is_taken in imported.values():
        if is_taken and full.startswith("torch.") and any(map(_is_private, full.split("."))):
            yield full
    for node in ast.walk(tree):
        first, *attributes = (_chain(node) if isinstance(node, ast.Attribute) else ()) or ("",)
        full, is_taken = imported.get(first, ("", False))
        if full.split(".")[0] != "torch" or (is_taken and any(map(_is_private, full.split(".")))):
            continue
        parts = [*full.split("."), *attributes]
        if private := [place for place, part in enumerate(parts) if _is_private(part)]:
            yield ".".join(parts[: private[-1] + 2])


def _longest(names: set[str]) -> set[str]:
    """Drop names that begin longer names: `torch._C` is part of the chain `torch._C._functorch`."""
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _member_names(trees: list[ast.Module]) -> set[str]:
    """The private names of members of a package's classes."""
    members: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.ClassDef(body=body):
                members |= {part.name for part in body if isinstance(part, ast.FunctionDef)}
                fields: list[ast.expr] = [line.target for line in body if isinstance(line, ast.AnnAssign)]
                fields += [target for line in body if isinstance(line, ast.Assign) for target in line.targets]
                members |= {field.id for field in fields if isinstance(field, ast.Name)}
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                members.add(name)
    return members


def _object_attributes(tree: ast.Module, members: set[str]) -> Iterator[str]:
    """Private attributes of objects, by access or by `getattr`, apart from the package's own members."""
    imported = {local for local, _, _ in _imports(tree)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if _chain(node)[:1] and _chain(node)[0] in imported:
                continue
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if name in members:
                continue
            case ast.Attribute(attr=name):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=name), *_]):
                pass
            case _:
                continue
        if isinstance(name, str) and _is_private(name) and name not in members | FOREIGN:
            yield f".{name}"


def _used_by(package: str, sources: dict[str, str]) -> Names:
    trees = [ast.parse(text) for text in sources.values()]
    members = _member_names(trees)
    names = {name for tree in trees for name in _object_attributes(tree, members)}
    for tree in trees:
        names |= _longest({*_through_modules(tree)})
    return {(package, name) for name in names}


@functools.cache
def _used() -> Names:
    used: Names = set()
    for folder in sorted((ROOT / "packages").iterdir()):
        used |= _used_by(folder.name, {str(file): file.read_text() for file in folder.glob("src/**/*.py")})
    return used


def _listed() -> Names:
    """The table's first two columns: names, and the packages using the names."""
    rows = [line.split(" | ")[:2] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {
        (package, name)
        for names, packages in rows
        for name in re.findall(r"`([^`]+)`", names)
        for package in packages.split(", ")
    }


def test_every_private_torch_name_that_a_package_uses_has_a_row() -> None:
    assert _used() - _listed() == set()


def test_every_row_is_of_a_private_torch_name_that_its_packages_use() -> None:
    assert _listed() - _used() == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._compile import _disable_dynamo", "torch._compile._disable_dynamo"),
        ("import torch\nif torch._C._functorch.get_unwrapped(x): pass", "torch._C._functorch.get_unwrapped"),
        ("import torch.utils._pytree as pytree\npytree.tree_map(f, x)", "torch.utils._pytree.tree_map"),
        ("import torch.utils.hooks as hooks\nhooks._global.x.y", "torch.utils.hooks._global.x"),
        ("def f(tensor): return tensor._local_tensor.shape", "._local_tensor"),
        ("def f(tensor): return getattr(tensor, '_shape_env', None)", "._shape_env"),
    ],
)  # fmt: skip
def test_uses_of_private_torch_names_are_found_in_every_spelling(source: str, name: str) -> None:
    assert _used_by("engine", {"file.py": source}) == {("engine", name)}


def test_names_of_the_package_itself_are_not_torchs() -> None:
    members = "import os\nclass A:\n    def __init__(self): self._b = 1\n    def _c(self): return self._b\n"
    assert _used_by("engine", {"file.py": members + "os._exit(a._b + a._c())"}) == set()
