"""Texts for validation: apart from the training text, by name, and the same over a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._command.main import main
from lamella._data.text import by_source, collect
from lamella._data.tokens import load_tokens
from lamella._export.model_card import model_card
from lamella._export.trained_run import open_run
from lamella._record.metrics import ValidationRecord, last_validations, read
from lamella._record.series import metric_rows, validation_series
from lamella._record.trackers import numbers
from lamella._settings.named_texts import named_texts
from lamella._training.preparation import prepare


def words(path: Path, word: str, count: int = 400) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{word} {number}\n" for number in range(count)), encoding="utf-8")
    return path


@pytest.fixture
def sets(tmp_path: Path) -> tuple[str, str]:
    """Two named validation sets, as `--validation-data` takes them."""
    return f"wiki={words(tmp_path / 'w.txt', 'article')}", f"code={words(tmp_path / 'c.txt', 'return')}"


def validated_on(config: Config, *paths: str) -> Config:
    return replace(config, data=replace(config.data, validation_paths=paths))


def test_every_validation_set_has_its_losses_in_metrics_output_and_card(
    config: Config, sets: tuple[str, str], train: TrainOn, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = train(validated_on(config, *sets), 2).directory
    records = [record for record in read(directory.metrics) if isinstance(record, ValidationRecord)]
    assert [(record.step, record.name) for record in records] == [
        (step, name) for step in (0, 3, 6) for name in ("wiki", "code")
    ]
    assert json.loads(directory.metrics.read_text().splitlines()[0])["name"] == "wiki"
    output = capfd.readouterr().out
    for record in records:
        assert f"step: {record.step}  validation on {record.name}: {record.nats:.4f} nats/byte" in output
    card = model_card(open_run(directory.root), model_type="llama", dtype="float32", version="0")
    for record in last_validations(records):
        assert f"| validation loss on {record.name} | {record.nats:.4f} nats/byte (step 6) |" in card
    assert numbers(records[0]) == {"validation/wiki/nats_per_byte": records[0].nats}
    names = [series.name for series in validation_series(metric_rows(directory.metrics))]
    assert names == ["validation on wiki", "validation on code"]

    assert main(["eval", str(directory.root), "--device", "cpu", "--json", "-"]) == 0
    texts = json.loads(capfd.readouterr().out)["texts"]
    assert [text["nats_per_byte"] for text in texts] == pytest.approx([r.nats for r in records[-2:]], rel=1e-5)


def test_the_loss_of_a_set_is_that_of_the_set_alone(
    config: Config, sets: tuple[str, str], train: TrainOn, tmp_path: Path
) -> None:
    both = read(train(validated_on(config, *sets), 2).directory.metrics)
    alone = replace(
        validated_on(config, sets[1].removeprefix("code=")),
        run=replace(config.run, directory=str(tmp_path / "alone")),
    )
    expected = train(alone, 1).validations[6]
    assert {r.name: r.nats for r in last_validations(both)}["code"] == pytest.approx(expected, rel=1e-5)


def test_a_file_for_validation_is_not_trained_on(tmp_path: Path) -> None:
    held_out = words(tmp_path / "text" / "b.txt", "held")
    words(tmp_path / "text" / "a.txt", "trained")
    corpus = collect([str(tmp_path / "text")], 0.5, validation_paths=[str(held_out)])
    assert [file.name for file in corpus.train] == ["a.txt"]
    assert [file.name for file in corpus.validation] == ["b.txt"]
    assert corpus.describe() == (
        f"1 files, {corpus.train[0].nbytes:,} bytes of {tmp_path / 'text'}; validation on 1 files, "
        f"{corpus.validation[0].nbytes:,} bytes of {held_out}"
    )
    with pytest.raises(ConfigError, match="apart from the files that other names or --validation-data hold"):
        collect([str(held_out)], 0.5, validation_paths=[str(held_out)])


def test_named_training_text_holds_out_a_share_of_each_name(tmp_path: Path) -> None:
    paths = [f"{name}={words(tmp_path / f'{name}.txt', name)}" for name in ("one", "two")]
    corpus = collect(paths, 0.25)
    for files, share in ((corpus.train, 0.75), (corpus.validation, 0.25)):
        assert [*by_source(files)] == ["one", "two"]
        for path, [file] in zip(paths, by_source(files).values(), strict=True):
            size = Path(path.partition("=")[2]).stat().st_size
            assert file.nbytes == pytest.approx(share * size, rel=0.05)


def test_changed_validation_text_or_names_are_refused_on_resume(
    config: Config, sets: tuple[str, str], train: TrainOn, tmp_path: Path
) -> None:
    config = validated_on(config, *sets)
    train(config, 1)
    more = replace(config, optim=replace(config.optim, steps=8))
    assert prepare(more).first_step == 6
    with pytest.raises(ConfigError, match="Pass the same --data, --validation-data and"):
        prepare(validated_on(more, sets[0], sets[1].replace("code=", "source=")))
    words(tmp_path / "c.txt", "yield")
    with pytest.raises(ConfigError, match="Pass the same --data, --validation-data and"):
        prepare(more)


def test_the_tokens_of_each_set_are_apart(config: Config, sets: tuple[str, str]) -> None:
    data = load_tokens(prepare(validated_on(config, *sets)).directory.tokens)
    assert data.validation_sets == ["wiki", "code"]
    first, second = (
        data.sequences("validation", 32, name).batch(torch.arange(2)).tokens for name in data.validation_sets
    )
    assert not first.equal(second)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("a.txt", "wiki=b.txt"), "Expected a name for each path of --data or for none, got 'a.txt' beside 'wiki'"),
        (("wiki=b.txt", "a.txt"), "Pass NAME=a.txt"),
    ],
)
def test_an_unnamed_data_path_beside_named_paths_is_refused(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_texts("--data", paths)


def test_a_name_may_have_several_paths_and_a_path_with_a_folder_any_name() -> None:
    assert named_texts("--data", ["a=x", "b=y", "a=z=1"]) == {"a": ("x", "z=1"), "b": ("y",)}
    assert named_texts("--data", ["./a=x", "/tmp/a=b"]) == {"": ("./a=x", "/tmp/a=b")}


def test_a_set_that_is_too_short_is_refused_by_its_name(config: Config, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one")
    with pytest.raises(ConfigError, match="33 tokens to validate on in 'wiki', got .*Pass more text as --validation-d"):
        prepare(validated_on(config, f"wiki={tmp_path / 'short.txt'}"))
    with pytest.raises(ConfigError, match="as --validation-data, got .*, which does not exist"):
        prepare(validated_on(config, f"wiki={tmp_path / 'absent.txt'}"))
