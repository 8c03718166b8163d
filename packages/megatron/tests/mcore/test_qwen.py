"""Tiny Qwen3.5s of transformers compute the same in a sharded megatron-core, are trained there, and go back."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from qwen_models import make_qwen
from resuming import World, assert_equal, read, train
from torch import nn

from lamella_convert import MegatronOptions, convert, find_family
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks, write_entry_points
from lamella_testing.megatron import LENGTH, VOCAB_SIZE

if TYPE_CHECKING:
    from lamella_testing.qwen import Kind

QWEN = Path(__file__).parents[3] / "qwen" / "pyproject.toml"
# Rotary embeddings turn four dims of a head: with two, neither their order nor their base would show.
SIZES = {"vocab_size": VOCAB_SIZE, "head_dim": 16}
TOKENS = torch.randint(VOCAB_SIZE, (3, LENGTH), generator=torch.Generator().manual_seed(2))

# megatron-core and torch warn about what they do to themselves.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture(scope="module", autouse=True)
def qwen(on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Qwen's rules are found by entry points."""
    with pytest.MonkeyPatch.context() as patch:
        if find_family("qwen3_5_moe_text") is None:  # A source tree has no entry points.
            site = tmp_path_factory.mktemp("site")
            project = tomllib.loads(QWEN.read_text())["project"]
            write_entry_points(site, "lamella-qwen", "lamella.families", project["entry-points"]["lamella.families"])
            patch.syspath_prepend(str(site))
        yield


@functools.cache
def _published(kind: Kind) -> Any:
    """transformers' model; its weights have values of bf16, as published weights have."""
    from lamella_testing.qwen import make_model  # imports transformers, which interpreters of GPUs may lack

    # Logits of about 1, from float64's within 2e-6: weights of four times the spread leave 3e-5.
    model = make_model(kind, spread=0.05, **SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def _publish(kind: Kind, path: Path) -> Any:
    """The files of transformers, and the weights in Bridge's names; the config."""
    model = _published(kind)
    model.save_pretrained(path / "hf")
    convert(path / "hf", path / "bridge", to="fsdp_dtensor", megatron=MegatronOptions(dialect="bridge"))
    return model.config


def _sharded(world: World, config: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard_model(make_qwen(world, config, seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def _logits(world: World, config: Any, path: Path) -> torch.Tensor:
    """This rank's logits of the whole vocabulary, from Bridge's names; and a checkpoint of the weights."""
    model, _ = _sharded(world, config, 1)
    load_checkpoint(path / "bridge", model=model)
    save_checkpoint(path / "saved", model=model)
    positions = torch.arange(LENGTH).expand(len(TOKENS), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS, positions, mask, runtime_gather_output=True)
    return logits


def _begin(world: World, config: Any, path: Path) -> list[float]:
    model, optimizer = _sharded(world, config, 1)
    load_checkpoint(path / "bridge", model=model)
    train(model, optimizer, 2)
    save_checkpoint(path / "saved", model=model, optimizer=optimizer, iteration=2)
    losses = train(model, optimizer, 2)
    save_checkpoint(path / "went on", model=model, optimizer=optimizer, iteration=4)
    return losses


def _resume(world: World, config: Any, path: Path) -> list[float]:
    model, optimizer = _sharded(world, config, 2)
    load_checkpoint(path / "saved", model=model, optimizer=optimizer)
    losses = train(model, optimizer, 2)
    save_checkpoint(path / "resumed", model=model, optimizer=optimizer, iteration=4)
    return losses


def test_queries_and_keys_are_normed_as_by_the_kernel_of_transformers() -> None:
    """With transformers' eps: a norm without one lengthens heads of small elements, and the logits are others."""
    from megatron.core.ssm.gated_delta_net import common

    heads = torch.tensor([[1e-3, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([0.5, 1 / (1 + 1e-6), 0.0], dtype=torch.float64).sqrt()
    torch.testing.assert_close(common.l2norm(heads).norm(dim=-1), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param("dense", World(2), marks=pytest.mark.slow),
        pytest.param("dense", World(4, tp=2), marks=pytest.mark.slow),
        pytest.param("moe", World(2), marks=pytest.mark.slow),
        ("moe", World(4, tp=2)),
        ("moe", World(4, tp=2, ep=2, etp=1)),
    ],
    ids=str,
)
def test_sharded_logits_are_transformers_and_weights_come_back_bit_equal(
    kind: Kind, world: World, tmp_path: Path
) -> None:
    config = _publish(kind, tmp_path)
    with torch.no_grad():
        expected = _published(kind)(TOKENS).logits
    for logits in run_ranks(_logits, world.num_ranks, world, config, tmp_path):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    convert(tmp_path / "saved", tmp_path / "back", to="hf", like=tmp_path / "hf")
    assert_equal(read(tmp_path / "back"), read(tmp_path / "hf"))


def test_qwen_trains_on_other_ranks_and_goes_back_to_hugging_face(tmp_path: Path) -> None:
    config = _publish("moe", tmp_path)
    first, other = World(4, tp=2, ep=2, etp=1), World(2)
    losses = run_ranks(_begin, first.num_ranks, first, config, tmp_path)[0]
    resumed = run_ranks(_resume, other.num_ranks, other, config, tmp_path)[0]
    torch.testing.assert_close(resumed, losses, rtol=1e-5, atol=1e-5)
    assert_equal(read(tmp_path / "resumed"), read(tmp_path / "went on"), rtol=1e-4, atol=1e-5)
    convert(tmp_path / "resumed", tmp_path / "trained", to="hf", like=tmp_path / "hf")
    published, trained = read(tmp_path / "hf"), read(tmp_path / "trained")
    assert {name: tensor.shape for name, tensor in trained.items()} == {
        name: tensor.shape for name, tensor in published.items()
    }
    assert not any(torch.equal(trained[name], published[name]) for name in published)
