"""A Qwen3.5 goes from Hugging Face to ranks, from ranks to other ranks, to Megatron's format and back, bit by bit.

On real process groups: tensor-parallel by data-parallel ranks, with experts on a mesh of their own. Each leg has
another world. The expected tensors of every rank are made by `live_megatron`, apart from the tested code.
"""

import re
from itertools import product
from pathlib import Path

import pytest
import torch._dynamo
from live_megatron import FullModel, PublishedRank, Rank, World
from qwen_tiny import translated, weights_of
from safetensors.torch import load_file, save_file

from lamella_checkpoint import save
from lamella_convert import Dialect, save_safetensors
from lamella_convert._translation.megatron import BRIDGE, RELEASE_0_19
from lamella_testing import run_ranks
from lamella_testing.qwen import KINDS, Kind, make_model


def make_full_model(kind: Kind, num_experts: int = 4) -> FullModel:
    """A layer of each sort is enough: the first, and the fourth, which is an attention layer."""
    weights = {
        name: tensor for name, tensor in weights_of(make_model(kind)).items() if not re.search(r"layers\.[12]\.", name)
    }
    if num_experts < 4:
        routed = (".mlp.experts.", ".mlp.gate.")
        weights |= {
            name: tensor[:num_experts]
            for name, tensor in weights.items()
            if any(routed_name in name for routed_name in routed)
        }
    return FullModel.of(kind, weights)


FULL_MODELS = {kind: make_full_model(kind) for kind in KINDS} | {"three experts": make_full_model("moe", num_experts=3)}

# One world a leg: Hugging Face's files, the native checkpoint, Megatron's. Together the worlds have every number of
# ranks along each axis, and every kind of slot; ranks with one expert more than others, and ranks with none.
CHAINS = [
    ("dense", RELEASE_0_19, World(2, 2), World(3, 1, is_even=True, slots="plain"), World(1, 4)),
    ("dense", BRIDGE, World(1, 1), World(3, 4, slots="data axis"), World(2, 1, is_even=True)),
    (
        "moe",
        RELEASE_0_19,
        World(2, 2, ep=2, slots="flat"),
        World(2, 4, ep=2, etp=4, slots="data axis"),
        World(3, 1, ep=3),
    ),
    (
        "moe",
        BRIDGE,
        World(3, 2, ep=2, etp=1, is_sequential=True),
        World(2, 2, ep=2, etp=2, is_even=True),
        World(1, 2, ep=2, slots="plain"),
    ),
    ("vision", BRIDGE, World(1, 4, slots="plain"), World(3, 2, slots="flat"), World(2, 1)),
    (
        "three experts",
        RELEASE_0_19,
        World(1, 2, ep=2, slots="data axis"),
        World(3, 2, ep=3, etp=2, slots="flat"),
        World(2, 1, ep=2, is_even=True),
    ),
    (
        "vision-moe",
        RELEASE_0_19,
        World(2, 1, ep=2, slots="plain"),
        World(2, 2, ep=2, slots="plain"),
        World(3, 1, is_sequential=True),
    ),
]


def name_of(value: object) -> str:
    return getattr(value, "name", str(value))


def read_published(rank: Rank, files: Path) -> None:
    rank.load(files, lambda source: translated(source, rank.full_model.rules, "right"), optimizer=False)


def publish(full_model: FullModel, directory: Path) -> Path:
    directory.mkdir()
    save_file(dict(full_model.published[""]), directory / "model.safetensors")
    return directory


def assert_published(full_model: FullModel, directory: Path) -> None:
    published = load_file(directory / "model.safetensors")
    assert published.keys() == full_model.published[""].keys()
    for name, tensor in full_model.published[""].items():
        assert torch.equal(published[name], tensor), name


@pytest.mark.parametrize(("kind", "dialect", "first", "second", "third"), CHAINS, ids=name_of)
def test_qwen_models_and_states_are_unchanged_by_resharding_to_other_worlds(
    tmp_path: Path, kind: str, dialect: Dialect, first: World, second: World, third: World
) -> None:
    full_model = FULL_MODELS[kind]
    files = publish(full_model, tmp_path / "hf")

    def train() -> None:
        rank = Rank(full_model, first)
        read_published(rank, files)
        rank.assert_holds(optimizer=False)
        rank.train()
        rank.save(tmp_path / "native")

    def hand_over() -> None:
        rank = Rank(full_model, second, is_stepped=True)
        rank.load(tmp_path / "native")
        rank.assert_holds()
        rank.export(tmp_path / "megatron", dialect)

    def take_back() -> None:
        rank = Rank(full_model, third)
        rank.load(tmp_path / "megatron")
        rank.assert_holds()
        rank.save(tmp_path / "back")
        published = PublishedRank(full_model, third)
        published.load(tmp_path / "back", is_canonical=True)
        published.assert_holds()
        save_safetensors(tmp_path / "published", model=published.model)

    run_ranks(train, first.num_ranks)
    run_ranks(hand_over, second.num_ranks)
    run_ranks(take_back, third.num_ranks)
    assert_published(full_model, tmp_path / "published")


def test_a_model_under_published_names_goes_from_ranks_to_other_ranks(tmp_path: Path) -> None:
    full_model = FULL_MODELS["moe"]
    files = publish(full_model, tmp_path / "hf")

    def read() -> None:
        rank = PublishedRank(full_model, World(3, 2, ep=2))
        rank.load(files)
        rank.assert_holds(optimizer=False)
        rank.train()
        save(tmp_path / "native", model=rank.model, optimizer=rank.optimizer)

    def write() -> None:
        rank = PublishedRank(full_model, World(1, 4, ep=2, etp=2))
        rank.load(tmp_path / "native")
        rank.assert_holds()
        save_safetensors(tmp_path / "published", model=rank.model)

    run_ranks(read, 6)
    run_ranks(write, 4)
    assert_published(full_model, tmp_path / "published")


def every_world(kind: str) -> list[World]:
    """Worlds of all fitting numbers of ranks along the axes, each with another form of tensors."""
    has_experts = "experts" in next(
        name for name in FULL_MODELS[kind].canonical[""] if ".mlp." in name and "fc2" in name
    )
    num_ep, slots = (1, 2) if has_experts else (1,), ("like", "plain", "flat", "data axis")
    fitting = [
        (dp, tp, ep, etp)
        for tp, dp, ep in product((1, 2, 4), (1, 2, 3), num_ep)
        for etp in sorted({1, tp} if has_experts else {1})
        if dp * tp % (ep * etp) == 0
    ]
    return [
        World(*sizes, is_even=index % 3 == 1, slots=slots[index % 4], is_sequential=index % 5 == 2)
        for index, sizes in enumerate(fitting)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL_MODELS)
def test_every_world_hands_over_to_the_next(tmp_path: Path, kind: str) -> None:
    full_model, worlds = FULL_MODELS[kind], every_world(kind)
    files = publish(full_model, tmp_path / "hf")

    def begin() -> None:
        rank = Rank(full_model, worlds[0])
        read_published(rank, files)
        rank.train()
        rank.save(tmp_path / "0")

    def pass_on(number: int) -> None:
        rank = Rank(full_model, worlds[number % len(worlds)], is_stepped=number % 2 == 0)
        rank.load(tmp_path / str(number - 1))
        rank.assert_holds()
        if number % 3:
            rank.export(tmp_path / str(number), (RELEASE_0_19, BRIDGE)[number % 3 - 1])
        else:
            rank.save(tmp_path / str(number))

    def end() -> None:
        published = PublishedRank(full_model, World(3, 2, ep=2))
        published.load(tmp_path / str(len(worlds)), is_canonical=True)
        published.assert_holds()
        save_safetensors(tmp_path / "published", model=published.model)

    run_ranks(begin, worlds[0].num_ranks)
    for number in range(1, len(worlds) + 1):
        run_ranks(pass_on, worlds[number % len(worlds)].num_ranks, number)
    run_ranks(end, 6)
    assert_published(full_model, tmp_path / "published")
