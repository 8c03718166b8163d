"""The configuration: what the command line and files may say, and how they are refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lamella import Config, ConfigError, ModelConfig, OptimConfig, cli
from lamella._model.spec import NAMED
from lamella._plan.cluster import Cluster
from lamella._settings.config import GROUPS, resolve, to_toml, to_values
from lamella._settings.files import read_file
from lamella._settings.options import fields_of
from lamella._settings.sizes import budget_nbytes, nbytes_of
from lamella._training.checks import run_root
from lamella._training.optimizer import learning_rate


def config_of(*argv: str) -> Config:
    return cli.config_of(cli.parse(["train", *argv]))


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_command_line_sets_fields_by_their_short_and_their_dotted_names() -> None:
    config = config_of("--steps", "7", "--optim.lr", "1e-3", "--no-reshard-after-forward", "--data", "a", "b")
    assert (config.optim.steps, config.optim.lr, config.parallel.reshard_after_forward) == (7, 1e-3, False)
    assert config.data.paths == ("a", "b")


def test_no_two_fields_have_the_same_option() -> None:
    flags = [field.flag for cls in GROUPS.values() for field in fields_of(cls)]
    assert len(set(flags)) == len(flags)


def test_every_option_is_explained_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.parse(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {field.flag}" in shown for cls in GROUPS.values() for field in fields_of(cls))
    assert "--optim.lr" not in shown  # It is the same option.
    assert all(name in shown for name in NAMED)
    assert "--precision auto|fp32|bf16" in shown
    assert "--float8-except PATTERN [PATTERN ...]" in shown


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "one of train, estimate, plan, export, generate, eval, run, ckpt, report, overlap-report, got none."),
        (["trian", "--steps", "3"], "got 'trian'. Did you mean 'train'?"),
        (["ckpt"], "Expected a command of `lamella ckpt`, one of inspect, diff, convert, verify, got none."),
        (["ckpt", "inspct", "x"], "got 'inspct'. Did you mean 'inspect'?"),
    ],
)
def test_a_missing_or_unknown_command_is_refused_with_the_existing_commands(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.parse(argv)
    assert expected in str(caught.value)


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    assert refusal("--step", "3") == "Expected an option of `lamella train`, got '--step'. Did you mean '--steps'?"
    assert "'--qqqqq'." in refusal("--qqqqq=1")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps", "few"], "Expected --steps to be an integer, got 'few'."),
        (["--steps", "1.5"], "Expected --steps to be an integer, got '1.5'."),
        (["--steps", "0"], "Expected --steps of at least 1, got 0."),
        (["--lr", "fast"], "Expected --lr to be a number, got 'fast'."),
        (["--lr", "nan"], "Expected --lr to be a finite number above 0, got nan."),
        (["--steps", f"-{10**400}"], f"Expected --steps of at least 1, got -1{'0' * 78}...."),
        (["--lr", "inf"], "Expected --lr to be a finite number above 0, got inf."),
        (["--clip-norm", "nan"], "Expected --clip-norm above 0, got nan."),
        (["--clip-norm=-inf"], "Expected --clip-norm above 0, got -inf."),
        (["--validation-fraction", "1"], "Expected --validation-fraction above 0 and below 1, got 1.0."),
        (["--device", "tpu"], "Expected --device to be one of 'auto', 'cpu', 'cuda', got 'tpu'."),
        (["--vocab-size", "256"], "Expected --vocab-size of at least 257, got 256."),
        (["--seed", "4294967296"], "Expected --seed of at least 0 and below 4294967296, got 4294967296."),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_the_options_name(argv: list[str], expected: str) -> None:
    assert refusal(*argv) == expected


def test_a_warm_up_past_the_last_step_is_refused_and_the_defaults_end_in_time() -> None:
    assert refusal("--steps", "6", "--warmup-steps", "7") == (
        "Expected --warmup-steps of at most --steps, 6, got 7. Pass --warmup-steps 6 or fewer, or more --steps."
    )
    assert config_of("--steps", "6", "--warmup-steps", "6").optim.num_warmup_steps == 6
    for model, steps, expected in (("llama-small", 6, 6), ("llama-small", 500, 40), ("llama-1b", 6, 6)):
        optim = config_of("--model", model, "--steps", str(steps)).optim
        assert optim.num_warmup_steps == expected
        assert max(learning_rate(step, optim) for step in range(steps)) == optim.lr
    assert config_of("--model", "llama-1b").optim.num_warmup_steps == 100


@pytest.mark.parametrize("option", ["--run-dir", "--checkpoints"])
def test_an_empty_text_as_of_an_unset_variable_is_refused(option: str) -> None:
    assert refusal(option, "") == f"Expected {option} to be a folder, got ''. Leave it out for the default."


def test_an_option_without_its_value_is_refused() -> None:
    assert "--steps" in refusal("--steps")


def test_a_file_lies_between_the_models_settings_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "llama-1b"\n[optim]\nlr = 1e-5\nsteps = 3\n', encoding="utf-8")
    config = config_of("--config", str(path), "--steps", "4")
    assert (config.optim.steps, config.optim.lr) == (4, 1e-5)
    assert config.data.sequence_length == 2048  # Of the named model.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[optim]\nlr = 1e-3\n", r"Expected a model in the configuration \(model.name, or --model\), got none"),
        ("[model]\nname = 'llama-small'\n[optim]\nlearning = 1\n", r"Expected a field of \[optim\] in .* 'learning'"),
        ("[model]\nname = 'llama-small'\n[optim]\nstep = 1\n", r"got 'step'. Did you mean 'steps'\?"),
        ("[model]\nname = 'llama-small'\n[optims]\nsteps = 1\n", r"got 'optims'. Did you mean 'optim'\?"),
        ("[model]\nname = 'llama-small'\n[optim]\nsteps = '1'\n", "Expected --steps to be an integer, got '1'"),
        ("[model]\nname = 'llama-small'\n[optim]\nsteps = true\n", "Expected --steps to be an integer, got True"),
        ("model = 'llama-small'\n", r"Expected a table \[model\] in .*, got 'llama-small'"),
        ("[model\n", "Expected a configuration in"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    assert re.search(expected, refusal("--config", str(path)))


def test_a_missing_file_is_refused() -> None:
    assert refusal("--config", "absent.toml").startswith("Expected a configuration in 'absent.toml', got No such file")


def test_the_printed_settings_can_be_read_back(tmp_path: Path) -> None:
    texts = ("--data", 'a "quoted" path', "\U0001f999 \x7f")
    config = config_of("--ranks", "3", *texts, "--lr", "1e-7", "--clip-norm", "inf", "--no-resume")
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert resolve(read_file(str(path))) == config
    assert resolve(to_values(config)) == config


def test_a_configuration_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="Expected --lr above 0, got -1"):
        Config(model=ModelConfig(name="llama-small"), optim=OptimConfig(lr=-1))
    config = Config(model=ModelConfig(name="llama-small"))
    with pytest.raises(ConfigError, match="Expected --batch-size to be an integer, got 'many'"):
        replace(config, optim=OptimConfig(batch_size="many"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen3.5-tiny", "qwen3.5-tiny"),
        ("Llama-3.1-8B", "Llama-3.1-8B"),
        ("Llama-3.1-8B/config.json", "Llama-3.1-8B"),
        ("Llama-3.1-8B/../Llama-3.1-8B", "Llama-3.1-8B"),
        ("tiny.json", "tiny"),
    ],
)
def test_the_folder_of_a_run_has_the_whole_name_of_the_model(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Llama-3.1-8B").mkdir()
    for file in ("Llama-3.1-8B/config.json", "tiny.json"):
        Path(file).write_text("{}", encoding="utf-8")
    assert run_root(Config(model=ModelConfig(name=model))) == Path("runs", name)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--ranks 4 --replicate 3", "Expected --replicate to divide the 4 ranks, got 3."),
        ("--spread-states", "Expected --spread-states with --replicate of 2 or more, got 1."),
        ("--replicate 2 --spread-states --stage 2", "Expected --spread-states with --stage 3 only, got 2."),
        ("--stage 1 --no-reshard-after-forward", "Expected --no-reshard-after-forward with --stage 3 only, got 1"),
        ("--stage 2 --keep-budget 1GiB", "Expected --keep-budget without --stage 2"),
        ("--no-reshard-after-forward --keep-budget 1GiB", "Expected --keep-budget without --no-reshard-after-forward"),
        ("--keep-budget much", "Expected --keep-budget to be a size such as 2GiB or 500MiB, got 'much'."),
        ("--reduce bf16 --precision fp32", "Expected --reduce bf16 with --precision bf16, got fp32."),
        ("--offload-activations --compile", "Expected --offload-activations without --compile"),
        ("--stage 4", "Expected --stage of at least 1 and below 4, got 4."),
    ],
)
def test_options_that_contradict_each_other_are_refused_together(options: str, expected: str) -> None:
    assert expected in refusal(*options.split())


@pytest.mark.parametrize(
    ("text", "nbytes"), [(None, 0), ("0", 0), ("12", 12), ("1.5KiB", 1536), ("2GiB", 2 << 30), ("500mb", 500 * 10**6)]
)
def test_budgets_are_sizes_and_nothing_is_none(text: str | None, nbytes: int) -> None:
    assert budget_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("7", 7), ("7B", 7), ("2K", 2000), ("1.5 mb", 1_500_000), ("3T", 3 * 10**12)),
        *(("2Ki", 2048), ("0.5 MiB", 1 << 19), ("3tib", 3 << 40)),
    ],
)
def test_sizes_are_decimal_without_i_and_binary_with_i(text: str, nbytes: int) -> None:
    assert nbytes_of(text, "--size") == nbytes


def test_a_budget_and_the_memory_of_a_cluster_are_the_same_sizes() -> None:
    assert budget_nbytes("80G") == Cluster(gpu_memory="80G").gpu_nbytes == 80 * 10**9
