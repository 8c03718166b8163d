"""Show that commits changed names only: the syntax trees with all names blanked are the same before and after.

    python tools/same_tree.py BASE [HEAD] [PATHS]      each .py file that differs between two commits (HEAD: the
                                                       checked-out one), at PATHS or anywhere; moved files too

Blanked are identifiers, docstrings, comments, and the parts of a dotted string (a `monkeypatch` target) that spell a
name which is on one side alone. Imports that follow each other may change their order, as sorting by name does. Prints
the files that differ otherwise, with the first differing line of both sides, and scopes in which one name stands for
two earlier ones, and exits with 1.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path
from typing import NamedTuple


class Token(NamedTuple):
    """A part of a tree.

    Attributes:
        text: A node's kind, a field, or a literal.
        line: Line in the source.
        blanked: A literal with renamed parts blanked; else the text.
    """

    text: str
    line: int
    blanked: str


class FilePair(NamedTuple):
    """The sources of a file in two commits; None for a commit without the file.

    Attributes:
        before: Path in the first commit.
        after: Path in the second commit.
        old: Source in the first commit.
        new: Source in the second commit.
    """

    before: str
    after: str
    old: str | None
    new: str | None


def main(args: list[str]) -> int:
    """Compare two commits; 1 where a file differs in more than names, 2 for arguments that name no commit."""
    base, *arguments = args or [""]
    head, *paths = arguments if arguments and _is_commit(arguments[0]) else ["HEAD", *arguments]
    if not _is_commit(base):
        print(f"Expected a commit as BASE, got {base!r}.\n\n{__doc__}", file=sys.stderr)
        return 2
    pairs = list(_pairs(base, head, paths))
    differences = list(_differences(pairs))
    print("".join(f"{line}\n" for line in differences), end="")
    print(f"{len(pairs)} files differ, {len(differences)} in more than names.")
    return 1 if differences else 0


def _differences(pairs: list[FilePair]) -> Iterator[str]:
    old_names, new_names = (set[str]().union(*map(_names, sources)) for sources in _columns(pairs))
    for pair in pairs:
        if pair.old is None or pair.new is None:
            yield f"{pair.after}: in one commit only"
            continue
        trees = ast.parse(pair.old), ast.parse(pair.new)
        old, new = _tokens(trees[0], old_names - new_names), _tokens(trees[1], new_names - old_names)
        for one, other in zip_longest(old, new, fillvalue=_token("the end", 0)):
            if one.text != other.text and one.blanked != other.blanked:
                yield f"{pair.after}:{other.line}: {other.text}, was {one.text} in line {one.line} of {pair.before}"
                break
        else:
            yield from (f"{pair.after}:{merger}" for merger in _mergers(*trees))


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _mergers(old: ast.AST, new: ast.AST) -> Iterator[str]:
    """The scopes of two equal trees in which two variables were given one name."""
    scopes = zip(*([node for node in ast.walk(tree) if isinstance(node, _SCOPES)] for tree in (old, new)), strict=True)
    for old_scope, new_scope in scopes:
        earlier_names: dict[str, set[str]] = {}
        for earlier, name in zip(_variables(old_scope), _variables(new_scope), strict=True):
            earlier_names.setdefault(name, set()).add(earlier)
        for name, names in earlier_names.items():
            if len(names) > 1:
                yield f"{new_scope.lineno}: {name} stands for {' and '.join(sorted(names))}"


def _variables(scope: ast.AST) -> Iterator[str]:
    """Names of the variables in a scope, in order, without the scopes inside."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.arg):
            yield child.arg
        if not isinstance(child, _SCOPES):
            yield from _variables(child)


def _columns(pairs: list[FilePair]) -> tuple[list[str], list[str]]:
    """All texts of each side, with the paths, whose parts are names of modules."""
    old = [pair.old for pair in pairs if pair.old is not None]
    new = [pair.new for pair in pairs if pair.new is not None]
    return [*old, *(_path_as_source(pair.before) for pair in pairs)], [
        *new,
        *(_path_as_source(pair.after) for pair in pairs),
    ]


def _path_as_source(path: str) -> str:
    return "\n".join(part for part in Path(path).with_suffix("").parts if part.isidentifier())


def _names(source: str) -> set[str]:
    """The identifiers of a source, parts of imported modules' names too."""
    names = [name for node in ast.walk(ast.parse(source)) for name in _identifiers(node)]
    return {part for name in names for part in name.split(".")}


def _identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        return
    for _, content in ast.iter_fields(node):
        yield from (text for text in (content if isinstance(content, list) else [content]) if isinstance(text, str))


def _tokens(node: ast.AST, renamed: set[str], line: int = 0) -> Iterator[Token]:
    """A tree in order of its fields, names blanked."""
    line = getattr(node, "lineno", line)
    yield _token(type(node).__name__, line)
    if isinstance(node, ast.Constant):
        yield Token(repr(node.value), line, _blanked(node.value, renamed))
        return
    for field, content in ast.iter_fields(node):
        if isinstance(content, ast.AST):
            yield from _tokens(content, renamed, line)
        elif isinstance(content, list):
            yield _token(f"{field}:", line)
            for child in _statements(content):
                yield from _tokens(child, renamed, line) if isinstance(child, ast.AST) else [_token("name", line)]
        else:
            yield _token(f"{field} {'name' if isinstance(content, str) else content!r}", line)


def _token(text: str, line: int) -> Token:
    return Token(text, line, text)


def _blanked(literal: object, renamed: set[str]) -> str:
    if isinstance(literal, str) and re.fullmatch(r"\w+(\.\w+)*", literal):
        return repr(".".join("_" if part in renamed else part for part in literal.split(".")))
    return repr(literal)


def _statements(children: list[object]) -> Iterator[object]:
    """Children of a field without docstrings; imports in a row by their number of names."""
    for is_import, run in groupby(children, lambda child: isinstance(child, ast.Import | ast.ImportFrom)):
        if is_import:
            yield from sorted(run, key=lambda child: (type(child).__name__, len(getattr(child, "names", []))))
        else:
            yield from (child for child in run if not _is_docstring(child))


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _pairs(base: str, head: str, paths: list[str]) -> Iterator[FilePair]:
    fields = _git("diff", "--name-status", "--find-renames=30%", "-z", base, head, "--", *paths).split("\0")[:-1]
    while fields:
        status, before = fields.pop(0), fields.pop(0)
        after = fields.pop(0) if status[0] in "RC" else before
        if after.endswith(".py"):
            old = None if status == "A" else _git("show", f"{base}:{before}")
            new = None if status == "D" else _git("show", f"{head}:{after}")
            yield FilePair(before, after, old, new)


def _is_commit(name: str) -> bool:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    return bool(name) and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, encoding="utf-8").stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
