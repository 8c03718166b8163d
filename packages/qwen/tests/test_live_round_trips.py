"""A Qwen3.5 goes from Hugging Face to ranks, from ranks to other ranks, to Megatron's format and back, bit by bit.

On real process groups: tensor-parallel by data-parallel ranks, with experts on a mesh of their own. Each leg has
another world. What every rank should hold is made by `live_megatron`, apart from what is tested.
"""

import pytest
import torch._dynamo
from live_megatron import PublishedRank, Rank, Whole, World
from qwen_tiny import KINDS, config_of, make_model, translated, weights_of
from safetensors.torch import load_file, save_file

from lamella_checkpoint import load, save_safetensors
from lamella_checkpoint._megatron import BRIDGE, RELEASE_0_19
from lamella_qwen import megatron_rules
from lamella_testing import run_ranks

WHOLE = {kind: Whole.of(kind, weights_of(make_model(kind))) for kind in KINDS}

# One world a leg: it reads Hugging Face's files, the native checkpoint, Megatron's. Together they have every number of
# ranks along each axis, and every kind of slot.
CHAINS = [
    ("dense", RELEASE_0_19, World(2, 2), World(3, 1, is_even=True, slots="plain"), World(1, 4)),
    ("dense", BRIDGE, World(1, 1), World(3, 4, slots="data axis"), World(2, 1, is_even=True)),
    (
        "moe",
        RELEASE_0_19,
        World(2, 2, ep=2, slots="flat"),
        World(2, 4, ep=2, etp=4, slots="data axis"),
        World(3, 1),
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
        "vision-moe",
        RELEASE_0_19,
        World(2, 1, ep=2, slots="plain"),
        World(2, 4, ep=2, etp=2, slots="plain"),
        World(3, 2, ep=1, etp=2, is_sequential=True),
    ),
]


def name_of(value):
    return getattr(value, "name", str(value))


def read_published(rank, files):
    rules = megatron_rules(config_of(rank.whole.kind))
    rank.load(files, lambda source: translated(source, rules, "right"), optimizer=False)


def publish(whole, directory):
    directory.mkdir()
    save_file(whole.published[""], directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(("kind", "dialect", "first", "second", "third"), CHAINS, ids=name_of)
def test_nothing_changes_from_world_to_world(tmp_path, kind, dialect, first, second, third):
    whole = WHOLE[kind]
    files = publish(whole, tmp_path / "hf")

    def train():
        read = Rank(whole, first, fill=False)
        read_published(read, files)
        read.assert_holds(optimizer=False)
        trained = Rank(whole, first)
        trained.save(tmp_path / "native")

    def hand_over():
        rank = Rank(whole, second, fill=False)
        rank.load(tmp_path / "native")
        rank.assert_holds()
        Rank(whole, second).export(tmp_path / "megatron", dialect)

    def take_back():
        rank = Rank(whole, third, fill=False)
        rank.load(tmp_path / "megatron")
        rank.assert_holds()
        rank.save(tmp_path / "back")
        published = PublishedRank(whole, third)
        rules = megatron_rules(config_of(kind))
        load(
            tmp_path / "back",
            model=published.model,
            optimizer=published.optimizer,
            translate=lambda source: translated(source, rules, "left"),
        )
        published.assert_holds()
        save_safetensors(tmp_path / "published", model=published.model)

    run_ranks(train, first.num_ranks)
    run_ranks(hand_over, second.num_ranks)
    run_ranks(take_back, third.num_ranks)
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert published.keys() == whole.published[""].keys()
    for name, tensor in whole.published[""].items():
        assert torch.equal(published[name], tensor), name
