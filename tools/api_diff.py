"""Show changes in the public names of packages since the last release of each.

    python tools/api_diff.py PACKAGE...

For each package: new names, and changes that break programs, against the last tag (`engine-v0.1.0`). Fails if names
break and the version promises none broken: before 1.0 the minor version has to rise, later the major version.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))
from griffe_exports import ExportsOwnNames

Version = tuple[int, int, int]


def main(packages: list[str]) -> int:
    """Print the changes of each package of the repository in this folder; 1 where a version hides a break."""
    return max([_report(Path.cwd(), package) for package in packages], default=0)


def _report(root: Path, package: str) -> int:
    now = _version((root / "packages" / package / "pyproject.toml").read_text())
    released = _last_release(root, package)
    if released is None:
        print(f"{package} {_text(now)}: nothing released to compare with")
        return 0
    tag = f"{package}-v{_text(released)}"
    old, new = _load(root, package, tag), _load(root, package, None)
    added = sorted({*(new.exports or [])} - {*(old.exports or [])}, key=str)
    breaks = [*griffe.find_breaking_changes(old, new)]
    print(f"{package} {_text(now)} since {tag}: {len(added)} names added, {len(breaks)} breaking changes")
    print("".join(f"  added {name}\n" for name in added), end="")
    for change in breaks:
        print(f"  {change.explain(griffe.ExplanationStyle.ONE_LINE)}")
    if breaks and _series(now) == _series(released):
        print(f"  Expected a version of another series than {_text(released)}, got {_text(now)}. Raise it.")
        return 1
    return 0


def _load(root: Path, package: str, tag: str | None) -> griffe.Module:
    """A package's names, of which only the exports of `__init__` are public."""
    name = "lamella" if package == "lamella" else f"lamella_{package}"
    extensions = griffe.load_extensions(ExportsOwnNames())
    paths = [f"packages/{package}/src"]
    if tag is None:
        package_module = griffe.load(name, search_paths=[root / paths[0]], extensions=extensions)
    else:
        package_module = griffe.load_git(name, ref=tag, repo=root, search_paths=paths, extensions=extensions)
    assert isinstance(package_module, griffe.Module)
    return package_module


def _last_release(root: Path, package: str) -> Version | None:
    listing = ["git", "-C", str(root), "tag", "--list", f"{package}-v*"]
    tags = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    return max((_parse(tag.removeprefix(f"{package}-v")) for tag in tags), default=None)


def _version(pyproject: str) -> Version:
    return _parse(tomllib.loads(pyproject)["project"]["version"])


def _parse(text: str) -> Version:
    major, minor, patch = map(int, text.split("."))
    return major, minor, patch


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def _series(version: Version) -> tuple[int, ...]:
    """The versions that must stay compatible."""
    return version[:2] if version[0] == 0 else version[:1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
