"""Mixtures of named sources: by their weights, each in epochs of its own, on any number of ranks and after any stop."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trained_runs import TrainOn

from lamella import Config, ConfigError, DataConfig
from lamella._data.batches import JoinedSequences, StreamSequences
from lamella._data.mixture import Mixture
from lamella._data.order import BatchStream, mixture_lines, mixture_of
from lamella._data.tokens import load_tokens
from lamella._settings.mixture import mixture_weights
from lamella._training.preparation import prepare

LENGTH = 4
COUNTS = (25, 7, 60)
WEIGHTS = (0.5, 0.2, 0.3)

weights_of_sources = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


def source(count: int, begin: int) -> StreamSequences:
    """Sequences of one source, each of whose tokens tells the source and the sequence."""
    return StreamSequences(tokens=begin + torch.arange(count * LENGTH + 1, dtype=torch.int32), sequence_length=LENGTH)


def stream(seed: int = 0, batch_size: int = 12, weights: tuple[float, ...] = WEIGHTS) -> BatchStream:
    parts = tuple(source(count, 1000 * number) for number, count in enumerate(COUNTS))
    return BatchStream(sequences=JoinedSequences(parts), batch_size=batch_size, seed=seed, mixture=Mixture.of(weights))


def drawn(steps: int, mixed: BatchStream | None = None) -> torch.Tensor:
    """Return the first token of each sequence of the first steps."""
    mixed = mixed or stream()
    return torch.cat([mixed.batch(step, 0, 1).tokens[:, 0] for step in range(steps)])


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 12])
def test_the_ranks_batches_together_are_the_single_ranks_batch(num_ranks: int) -> None:
    for step in range(20):
        parts = [stream().batch(step, rank, num_ranks).tokens for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts), stream().batch(step, 0, 1).tokens)


def test_batches_follow_the_mixture_weights_within_two_sequences() -> None:
    for step in range(50):
        sources = stream().batch(step, 0, 1).tokens[:, 0] // 1000
        for number, weight in enumerate(WEIGHTS):
            assert abs(int((sources == number).sum()) - 12 * weight) <= 2


@given(weights_of_sources, st.integers(1, 1 << 40))
def test_mixture_draws_follow_the_weights_at_any_position(weights: list[float], position: int) -> None:
    mixture = Mixture.of(weights)
    assert sum(mixture.shares) == 1 << 20
    assert min(mixture.shares) >= 1
    draws = mixture.draws(torch.tensor([position, position + 1]))
    assert draws.sum(1).tolist() == [position, position + 1]
    assert sorted((draws[1] - draws[0]).tolist()) == [0] * (len(weights) - 1) + [1]
    for fraction, count, weight in zip(mixture.fractions, draws[0].tolist(), weights, strict=True):
        assert abs(count - position * fraction) < 1.5
        assert fraction == pytest.approx(weight / sum(weights), abs=len(weights) * 2**-20)


@given(weights_of_sources, st.sampled_from([-1000, 1, 1013]))
def test_mixture_shares_do_not_depend_on_the_size_of_the_weights(weights: list[float], exponent: int) -> None:
    assert Mixture.of([math.ldexp(weight, exponent) for weight in weights]) == Mixture.of(weights)


def test_weights_whose_sum_would_be_infinite_have_their_shares() -> None:
    assert Mixture.of([1e308, 1e308]).fractions == (0.5, 0.5)


def test_every_source_of_a_mixture_is_shuffled_anew_in_each_of_its_epochs() -> None:
    firsts = drawn(40)
    for number, count in enumerate(COUNTS):
        of_source = firsts[firsts // 1000 == number] - 1000 * number
        epochs = [epoch.tolist() for epoch in torch.split(of_source, count) if len(epoch) == count]
        assert len(epochs) == int(40 * 12 * WEIGHTS[number]) // count
        assert all(sorted(epoch) == list(range(0, count * LENGTH, LENGTH)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_the_seed_decides_the_order_and_sources_of_equal_length_differ() -> None:
    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(5, stream(seed=1)))
    twins = BatchStream(
        sequences=JoinedSequences((source(30, 0), source(30, 1000))),
        batch_size=10,
        seed=0,
        mixture=Mixture.of([1, 1]),
    )
    firsts = drawn(6, twins)
    assert firsts[firsts < 1000].tolist() != (firsts[firsts >= 1000] - 1000).tolist()


def test_the_divisor_of_the_mean_counts_the_targets_of_all_sources() -> None:
    counted = [
        replace(source(count, 0), target_counts=torch.full((count,), number + 1, dtype=torch.int32))
        for number, count in enumerate(COUNTS)
    ]
    mixed = replace(stream(), sequences=JoinedSequences(tuple(counted)))
    sources = stream().batch(3, 0, 1).tokens[:, 0] // 1000
    assert mixed.num_targets(3) == int((sources + 1).sum())


def words(path: Path, word: str, count: int) -> Path:
    path.write_text("".join(f"{word} {number}\n" for number in range(count)), encoding="utf-8")
    return path


@pytest.fixture
def mixed(config: Config, tmp_path: Path) -> Config:
    """Settings of a run on a large and a small source."""
    paths = [f"{name}={words(tmp_path / f'{name}.txt', name, count)}" for name, count in (("big", 3000), ("low", 300))]
    data = replace(config.data, paths=tuple(paths), mixture=("low=0.5", "big=1.5"))
    return replace(config, data=data, run=replace(config.run, checkpoint_interval=3))


def test_a_stopped_run_goes_on_with_the_losses_of_an_uninterrupted_one_on_other_ranks(
    mixed: Config, train: TrainOn, tmp_path: Path
) -> None:
    uninterrupted = train(mixed, 2)
    shutil.copytree(uninterrupted.directory.root, resumed := tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "step_00000006")
    again = train(replace(mixed, run=replace(mixed.run, directory=str(resumed))), 1)
    assert again.losses == pytest.approx(uninterrupted.losses, rel=1e-5)


def test_the_start_tells_the_epochs_of_each_source_and_a_resume_keeps_the_weights(
    mixed: Config, train: TrainOn
) -> None:
    prepared = prepare(mixed)
    parts = load_tokens(prepared.directory.tokens).sequences("train", 32)
    assert isinstance(parts, JoinedSequences)
    lines = [line for line in prepared.lines if line.startswith("mixture: ")]
    assert lines == mixture_lines(parts, mixed.data, 48)
    big, low = map(len, parts.parts)
    assert lines == [
        f"mixture: 75.0% big, 36 of its {big:,} sequences, {36 / big:.2f} epochs",
        f"mixture: 25.0% low, 12 of its {low:,} sequences, {12 / low:.2f} epochs",
    ]
    train(mixed, 1)
    more = replace(mixed, optim=replace(mixed.optim, steps=8))
    for mixture in (("low=0.5", "big=1.5"), ("big=1.5", "low=.50"), ("low=25", "big=75")):
        assert prepare(replace(more, data=replace(more.data, mixture=mixture))).first_step == 6
    with pytest.raises(ConfigError, match=r"Expected data.mixture to stay \('low=0.5', 'big=1.5'\)"):
        prepare(replace(more, data=replace(more.data, mixture=("low=1", "big=1"))))


def test_named_sources_without_weights_are_one_stream_of_all_sequences(mixed: Config) -> None:
    data = replace(mixed.data, mixture=())
    sequences = load_tokens(prepare(replace(mixed, data=data)).directory.tokens).sequences("train", 32)
    every = BatchStream(sequences=sequences, batch_size=len(sequences), seed=0, mixture=mixture_of(data))
    firsts = every.batch(0, 0, 1).tokens
    expected = sequences.batch(torch.arange(len(sequences))).tokens
    assert sorted(firsts.tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize(
    ("paths", "mixture", "message"),
    [
        (("a=x", "b=y"), ("a=0.7",), "Expected in --mixture each name of --data once, a, b, got a=0.7. Pass"),
        (("a=x", "b=y"), ("a=1", "b=1", "a=2"), "each name of --data once, a, b, got a=1, b=1, a=2"),
        (("x",), ("a=1",), "each name of --data once, of which there are none, got a=1"),
        (("a=x",), ("a",), "Expected --mixture to be of NAME=X with a weight X above 0, got 'a'"),
        (("a=x",), ("a=0",), "weight X above 0, got 'a=0'"),
        (("a=x",), ("a=inf",), "weight X above 0, got 'a=inf'"),
        (("a=x", "y"), (), "Expected a name for each path of --data or for none"),
    ],
)
def test_weights_of_other_names_and_no_weights_are_refused(
    config: Config, paths: tuple[str, ...], mixture: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, data=replace(config.data, paths=paths, mixture=mixture))


def test_weights_are_in_the_order_of_the_sources() -> None:
    weights = mixture_weights(DataConfig(paths=("a=x", "b=y", "a=z"), mixture=("b=3", "a=1")))
    assert weights == {"a": 1.0, "b": 3.0}
    assert math.isclose(Mixture.of([*weights.values()]).fractions[0], 0.25)
