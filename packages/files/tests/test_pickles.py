"""Pickles are data: no code runs, and no small pickle takes gigabytes or an endless walk."""

import io
import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from lamella_files import CheckpointDamaged, Inert, read_pickle
from lamella_files._archives.objects import unpickle
from lamella_files._base.pickles import PickleTooLarge, UnknownType
from lamella_testing.hostile_pickles import NUMBERED, Runs, numbered

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not os.path.exists("ran")


def test_stand_in_classes_are_not_shared_between_pickles() -> None:
    first, second = (read_pickle(pickle.dumps(MetadataIndex), knows=lambda *_: True) for _ in range(2))
    assert first is not second and issubclass(first, Inert)


def test_unknown_types_are_stand_ins_where_the_reader_knows_all() -> None:
    contents = read_pickle(pickle.dumps({"a": Runs()}), knows=lambda *_: True)
    assert contents["a"].kind == "posix.mkdir" and contents["a"].args == ("ran",)
    with pytest.raises(UnknownType, match="posix.mkdir"):
        read_pickle(pickle.dumps(Runs()), knows=lambda *_: False)


@pytest.mark.parametrize("how", NUMBERED)
def test_an_archive_with_large_numbers_for_values_is_refused(tmp_path: Path, how: str) -> None:
    file = tmp_path / "object"
    torch.save({"step": 3}, file)
    with zipfile.ZipFile(file) as archive:
        contents = {member: archive.read(member) for member in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for member_name, content in contents.items():
            archive.writestr(member_name, numbered(content, how) if member_name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointDamaged, match="to number as many values") as info:
        unpickle(io.BytesIO(file.read_bytes()), file, "step", trust=True)
    assert info.value.file == str(file)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    ),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
    where=st.floats(0, 1),
)
def test_large_memo_numbers_are_refused_anywhere_in_a_pickle(value: object, protocol: int, where: float) -> None:
    content = pickle.dumps(value, protocol)
    assert repr(read_pickle(content, knows=lambda *_: True)) == repr(value)
    places = [place for _, _, place in pickletools.genops(content)]
    place = places[int(where * (len(places) - 1))]
    for number in NUMBERED.values():
        with pytest.raises(PickleTooLarge):
            read_pickle(content[:place] + number + content[place:], knows=lambda *_: True)


def _doubled(make: Callable[[Any, Any], object], depth: int = 40) -> object:
    node = make("leaf", "leaf")
    for _ in range(depth):
        node = make(node, node)
    return node


NESTS: dict[str, Callable[[Any, Any], object]] = {
    "lists": lambda a, b: [a, b],
    "tuples": lambda a, b: (a, b),
    "dicts": lambda a, b: {"a": a, "b": b},
    "ordered dicts": lambda a, b: OrderedDict(a=a, b=b),
    "objects": lambda a, b: StorageMeta(a, b),
}


@pytest.mark.parametrize("nest", NESTS)
def test_values_that_hold_one_another_twice_over_and_over_are_refused(nest: str) -> None:
    content = pickle.dumps(_doubled(NESTS[nest]))
    assert len(content) < 10_000
    with pytest.raises(PickleTooLarge):
        read_pickle(content, knows=lambda *_: True)


def test_a_value_that_holds_itself_is_refused() -> None:
    node: list[object] = []
    node.append(node)
    with pytest.raises(PickleTooLarge):
        read_pickle(pickle.dumps(node), knows=lambda *_: False)


def test_a_value_shared_a_hundred_times_in_a_pickle_is_read() -> None:
    shared = list(range(1000))
    assert read_pickle(pickle.dumps([shared] * 100), knows=lambda *_: False) == [shared] * 100


@pytest.mark.parametrize("trust", [False, True])
def test_an_object_that_never_ends_is_refused_by_name(tmp_path: Path, trust: bool) -> None:
    content = io.BytesIO()
    torch.save(_doubled(NESTS["lists"]), content)
    with pytest.raises(CheckpointDamaged, match="epoch"):
        unpickle(content, tmp_path / "bomb", "epoch", trust=trust)
