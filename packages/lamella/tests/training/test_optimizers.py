"""Optimizers by import path, schedules, epochs and frozen parameters: on any ranks, and resumed to the same losses."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_runs import Run, TrainOn

from lamella import Config, ConfigError, OptimConfig
from lamella._data.tokens import load_tokens
from lamella._model.spec import load_spec
from lamella._processes.placement import place
from lamella._settings.config import Values, resolve, to_toml, to_values
from lamella._settings.files import read_file
from lamella._training import writing
from lamella._training.optimizer import learning_rate, make_optimizer
from lamella._training.optimizer_class import OptimizerClass, check_optimizer
from lamella._training.preparation import prepare
from lamella.cli import main
from lamella_checkpoint import load
from lamella_convert import open_checkpoint
from lamella_transformers import build_model

LION = '''
import torch


class Lion(torch.optim.Optimizer):
    """A class that is not torch's, and that counts in its groups."""

    def __init__(self, params, lr, weight_decay=0.0, betas=(0.9, 0.99)):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=tuple(betas), num_steps=0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["num_steps"] += 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (beta1 * momentum + (1 - beta1) * p.grad).sign()
                p.sub_(update, alpha=group["lr"] / math.sqrt(group["num_steps"]))
                momentum.lerp_(p.grad, 1 - beta2)


class Normed(Lion):
    """Its update has the norm of the whole gradient."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


not_a_class = 3
'''.replace("import torch\n", "import math\n\nimport torch\n", 1)


@pytest.fixture
def lion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder."""
    (tmp_path / "lion_of_mine.py").write_text(LION, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("lion_of_mine", None)


def with_optim(config: Config, **optim: Any) -> Config:
    return replace(config, optim=replace(config.optim, **optim))


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(place(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("torch.optim:SGD", ("momentum=0.9",)), ("lion_of_mine:Lion", ("betas=[0.8, 0.95]",))],
)
@pytest.mark.usefixtures("lion")
def test_a_run_of_any_optimizer_resumes_on_other_ranks_to_the_same_losses(
    config: Config, train: TrainOn, optimizer: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    config = with_optim(config, optimizer=optimizer, optimizer_options=options, lr=3e-3, steps=6)
    config = replace(config, run=replace(config.run, checkpoint_interval=3))
    uninterrupted = train(config, 2)
    assert uninterrupted.losses[6] < uninterrupted.losses[1]
    resumed = train(replace(config, run=replace(config.run, from_step=3)), 1)
    assert resumed.losses == pytest.approx(uninterrupted.losses, rel=2e-5)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({"optimizer": "torch.optim:Adafactor"}, "updates each element by itself, since ranks hold parts"),
        ({"optimizer": "torch.optim:Muon"}, "got torch.optim:Muon, whose step on a matrix differs from its steps on"),
        ({"optimizer": "lion_of_mine:Normed"}, "adamw or muon, or the import path of an elementwise one"),
        ({"optimizer": "torch.optim:LBFGS"}, "Expected --optimizer torch.optim:LBFGS to step parameters on cpu, got "),
        ({"optimizer": "lion_of_mine:not_a_class"}, "--optimizer lion_of_mine:not_a_class to be a class, got 3"),
        ({"optimizer": "absent_package:X"}, "to be importable, got No module named 'absent_package'."),
        ({"optimizer": "torch.optim:Lion"}, "module 'torch.optim' has no attribute 'Lion'."),
        ({"optimizer": "sgd"}, "muon or an import path package:Class, got 'sgd'. Pass --optimizer torch.optim:SGD."),
        ({"optimizer": "lion"}, "muon or an import path package:Class, got 'lion'. Pass --optimizer adamw or"),
        ({"optimizer_options": ("momentum=1",)}, "--optimizer-options with muon or an --optimizer by import path"),
        ({"optimizer": "torch.optim:SGD", "optimizer_options": ("momentum",)}, "as NAME=X, such as momentum=0.9, got "),
        ({"optimizer": "torch.optim:SGD", "optimizer_options": ("nope=1",)}, "unexpected keyword argument 'nope'."),
        ({"optimizer": "torch.optim:SGD", "optimizer_options": ("lr=3",)}, "got lr, which is --lr. Pass --lr."),
        ({"optimizer": "torch.optim:SGD", "optimizer_options": ("weight_decay=1",)}, "which is --weight-decay. Pass "),
        ({"optimizer": "torch.optim:SGD", "optimizer_options": ("nesterov=0", "nesterov=1")}, "each name once in --"),
        ({"train": ("model.layer.*",)}, "Expected --train to match a parameter of the model, got 'model.layer.*'."),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("lion")
def test_optimizers_and_patterns_that_no_run_can_take_are_one_line(
    config: Config, optim: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(with_optim(config, **optim))


def test_options_without_their_state_in_the_checkpoint_are_refused(config: Config, train: TrainOn) -> None:
    config = with_optim(config, optimizer="torch.optim:RMSprop", optimizer_options=("alpha=0.9",), steps=2)
    train(config, 1)
    longer = with_optim(config, steps=3)
    assert prepare(place(with_optim(longer, optimizer_options=("alpha=0.5",)))).first_step == 2
    message = refusal(with_optim(longer, optimizer_options=("alpha=0.9", "momentum=0.9")))
    assert (
        "torch.optim:RMSprop goes on from the state of the run to be resumed, got KeyError: 'momentum_buff" in message
    )
    assert "Pass the former options (alpha=0.9), or another --run-dir." in message


def test_muon_goes_on_with_the_options_of_its_run_and_with_other_values(config: Config, train: TrainOn) -> None:
    config = with_optim(config, optimizer="muon", optimizer_options=("momentum=0.2", "nesterov=false"), steps=2)
    train(config, 1)
    longer = with_optim(config, steps=3)
    assert prepare(place(with_optim(longer, optimizer_options=("nesterov=true", "momentum=0.2")))).first_step == 2
    message = refusal(with_optim(longer, optimizer_options=("nesterov=false",)))
    assert "Expected momentum in --optimizer-options, as in the run to be resumed, got no value. Pass mom" in message


@pytest.mark.parametrize(
    ("optimizer", "before", "now", "is_refused"),
    [
        ("torch.optim:SGD", (), ("momentum=0.9",), False),
        ("torch.optim:SGD", ("momentum=0.9",), ("momentum=0",), False),
        ("torch.optim:SGD", ("momentum=0.9",), (), True),
        ("torch.optim:Adam", (), ("amsgrad=true",), True),
        ("torch.optim:Adam", ("amsgrad=true",), ("amsgrad=false",), False),
        ("lion_of_mine:Lion", (), ("betas=[0.5, 0.6]",), False),
    ],
)
@pytest.mark.usefixtures("lion")
def test_options_change_where_a_step_takes_the_former_state(
    optimizer: str, before: tuple[str, ...], now: tuple[str, ...], is_refused: bool
) -> None:
    former, changed = (
        OptimizerClass.of(OptimConfig(optimizer=optimizer, optimizer_options=options)) for options in (before, now)
    )
    with (
        pytest.raises(ConfigError, match="Pass (the former options|momentum=0.9, or another value)")
        if is_refused
        else nullcontext()
    ):
        changed.check_state(former)


def today(step: int, optim: OptimConfig) -> float:
    """The curve of the first release, which a resumed run goes on with."""
    if step < optim.num_warmup_steps:
        return optim.lr * (step + 1) / optim.num_warmup_steps
    done = (step - optim.num_warmup_steps) / (optim.steps - optim.num_warmup_steps)
    return optim.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 0.1 + 0.9 * (1 - done),
    "constant": lambda done: 1.0,
    "wsd": lambda done: 1.0 if done <= 38 / 50 else 0.1 + 0.9 * (1 - done) * 50 / 12,  # a fifth of 60 steps
}


def test_the_default_schedule_is_the_cosine_bit_by_bit() -> None:
    optim = OptimConfig(steps=90, warmup_steps=10)
    assert [learning_rate(step, optim) for step in range(90)] == [today(step, optim) for step in range(90)]


@pytest.mark.parametrize("schedule", CURVES)
def test_a_schedule_warms_up_and_has_its_curve(schedule: Any) -> None:
    optim = OptimConfig(steps=60, warmup_steps=10, schedule=schedule, lr=2.0)
    assert [learning_rate(step, optim) for step in (0, 4, 9)] == [0.2, 1.0, 2.0]
    for step in range(10, 61):
        assert learning_rate(step, optim) == pytest.approx(2.0 * CURVES[schedule]((step - 10) / 50))


def test_the_last_steps_fall_from_the_end_of_a_long_warm_up() -> None:
    optim = OptimConfig(steps=20, warmup_steps=16, schedule="wsd", decay_fraction=0.5, final_lr_fraction=0.0, lr=1.0)
    assert [learning_rate(step, optim) for step in range(15, 21)] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_epochs_are_the_steps_that_pass_over_the_text(config: Config, train: TrainOn) -> None:
    config = with_optim(config, epochs=0.02, warmup_steps=1)
    prepared = prepare(place(config))
    tokens = load_tokens(prepared.directory.tokens)
    expected = math.ceil(0.02 * len(tokens.sequences("train", 32)) / 8)
    assert prepared.config.optim.steps == expected > 1
    stored = json.loads(prepared.directory.config.read_text())["optim"]
    assert stored["steps"] == expected and stored["epochs"] is None
    assert prepare(place(config)).config == prepared.config  # again, as a resumed run does


def test_a_named_models_warm_up_is_left_out_of_fewer_steps(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_optim(config, epochs=0.02, warmup_steps=1000)
    with pytest.raises(ConfigError, match="--warmup-steps of at most --steps"):
        prepare(place(config))
    monkeypatch.setattr(writing, "named_settings", lambda name: {"optim": {"warmup_steps": 1000}})
    optim = prepare(place(config)).config.optim
    assert optim.warmup_steps is None and 1 < optim.num_warmup_steps <= 40


def test_steps_and_epochs_replace_each_other_and_are_not_passed_together(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named: Values = {"model": {"name": "x"}, "optim": {"steps": 9}}
    of_a_file: Values = {"optim": {"epochs": 2}}
    assert resolve(named, of_a_file).optim.epochs == 2
    assert resolve(named, of_a_file, {"optim": {"steps": 4}}).optim == replace(OptimConfig(), steps=4)
    in_epochs = resolve(named, of_a_file)
    (tmp_path / "printed.toml").write_text(to_toml(in_epochs), encoding="utf-8")
    assert resolve(read_file(str(tmp_path / "printed.toml"))) == in_epochs == resolve(to_values(in_epochs))
    assert main([*options, "--epochs", "2"]) == 2  # `options` have --steps
    assert "Expected --steps or --epochs, got both, 6 and 2.0. Pass one of them.\n" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_workers")
def test_the_command_trains_epochs(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    at = options.index("--steps")
    argv = [*options[:at], *options[at + 2 :], "--epochs", "0.01", "--warmup-steps", "1", "--ranks", "1"]
    assert main(argv) == 0
    output = capfd.readouterr().out
    steps = int(next(line for line in output.splitlines() if line.startswith("steps = ")).removeprefix("steps = "))
    assert f"step: {steps}  loss: " in output and f"step_{steps:08}" in output
    assert main(argv) == 0
    assert f"Already complete at step {steps}." in capfd.readouterr().out


PATTERNS = ("model.layers.1*", "*norm.weight")


@pytest.fixture
def frozen(config: Config) -> Config:
    config = with_optim(config, train=PATTERNS, lr=3e-3)
    return replace(config, run=replace(config.run, checkpoint_interval=3))


def tensors(run: Run, step: int) -> tuple[dict[str, torch.Tensor], set[str]]:
    """A checkpoint's parameters, and the names of the parameters that have optimizer state."""
    checkpoint = run.directory.checkpoints / f"step_{step:08}"
    model = build_model(load_spec(str(run.directory.model)), torch.device("cpu"), seed=0)
    load(checkpoint, model=model)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    states = [key for key in open_checkpoint(checkpoint).raw.tensors if key.startswith("optimizer.")]
    return parameters, {name for name in parameters if any(name in state for state in states)}


def test_frozen_parameters_stay_without_optimizer_state_and_the_run_resumes_on_other_ranks(
    frozen: Config, train: TrainOn
) -> None:
    run = train(frozen, 2)
    (before, _), (after, states) = tensors(run, 3), tensors(run, 6)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    trained = {name for name in after if name.startswith("model.layers.1") or name.endswith("norm.weight")}
    assert changed == trained == states and len(trained) < len(after)

    refused: list[tuple[dict[str, Any], str]] = [
        ({"train": ()}, "Expected optim.train to stay ('model.layers.1*', '*norm.weight') as in the run to be resumed"),
        ({"optimizer": "torch.optim:SGD"}, "Expected optim.optimizer to stay 'adamw' as in the run to be resumed, got"),
    ]
    for optim, expected in refused:
        assert expected in refusal(with_optim(frozen, steps=9, **optim))

    resumed = train(replace(frozen, run=replace(frozen.run, from_step=3)), 1)
    assert resumed.losses == pytest.approx(run.losses, rel=2e-5)


def test_the_start_says_how_much_is_trained(frozen: Config) -> None:
    lines = prepare(place(frozen)).lines
    assert any(line.startswith("trained: ") and line.endswith(" parameters; the others are frozen") for line in lines)


def test_weight_decay_is_on_matrices_alone_for_any_class() -> None:
    model = torch.nn.Linear(3, 2)
    optim = OptimConfig(optimizer="torch.optim:SGD", weight_decay=0.25)
    assert [group["weight_decay"] for group in make_optimizer(model, optim).param_groups] == [0.25, 0.0]


def test_states_of_other_optimizers_and_an_absent_torchao_are_one_line(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "Expected --states int8 with --optimizer adamw, got muon. Leave one of them out."
    assert refusal(with_optim(config, states="int8", optimizer="muon")) == expected
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "or install it from a clone: uv pip install './packages/lamella[torchao]'" in refusal(
        with_optim(config, states="bf16")
    )


def test_adamws_options_are_refused_with_another_optimizer() -> None:
    check_optimizer(OptimConfig(optimizer="torch.optim:Adam"), "cpu")
    with pytest.raises(ConfigError, match=r"--beta2 with --optimizer adamw or muon, got 0\.5 with torch\.optim:Adam"):
        check_optimizer(OptimConfig(optimizer="torch.optim:Adam", beta2=0.5), "cpu")
