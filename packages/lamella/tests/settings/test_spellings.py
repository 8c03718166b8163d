"""Options of other trainers are refused with the option, or the page, that serves."""

import re
from pathlib import Path

import pytest

from lamella import ConfigError, cli
from lamella._settings import spellings
from lamella._settings.config import GROUPS
from lamella._settings.options import fields_of
from lamella._settings.spellings import field_of_spelling, option_of_spelling

FLAGS = {field.flag for cls in GROUPS.values() for field in fields_of(cls)}
ROOT = Path(__file__).parents[4]


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cli.parse(["train", *argv])
    return str(caught.value)


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--learning-rate", "Pass --lr."),
        ("--learning_rate=3e-4", "Pass --lr."),
        ("--num-train-epochs", "Pass --epochs."),
        ("--bf16", "Pass --precision bf16."),
        ("--output_dir", "Pass --run-dir."),
        ("--optim", "Pass --optimizer."),
        ("--per-device-train-batch-size", "Pass --batch-size, which counts the sequences of all ranks, and --accu"),
        ("--fp16", "Pass --precision bf16, which needs no loss scaling; there is no fp16."),
        ("--lora-r", "Pass --lora-rank."),
        ("--gradient-checkpointing", "Pass --recompute full."),
        ("--deepspeed", "sharded already, as ZeRO-3 does: leave it out, or pass --stage."),
        ("--stepps", "Did you mean '--steps'?"),
    ],
)
def test_an_option_of_another_trainer_is_refused_with_the_option_that_serves(flag: str, hint: str) -> None:
    message = refusal(flag, "3")
    assert message.startswith(f"Expected an option of `lamella train`, got {flag.partition('=')[0]!r}. ")
    assert hint in message


def test_hints_for_other_trainers_options_name_existing_options_and_pages() -> None:
    for name, hint in spellings._HINTS.items():
        named = re.findall(r"--[a-z][a-z0-9-]*", hint)
        assert set(named) <= FLAGS, (name, hint)
        for page in re.findall(r"docs/[\w/.-]+\.md", hint):
            assert (ROOT / page).is_file(), page
        assert named or "docs/" in hint


def test_no_spelling_is_an_option_itself() -> None:
    assert not {f"--{name}" for name in spellings._HINTS} & FLAGS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rate", " Did you mean 'lr' in [optim]?"),
        ("output_dir", " Did you mean 'directory' in [run]?"),
        ("bf16", " On the command line: pass --precision bf16."),
        ("stepps", ""),
    ],
)
def test_a_field_of_another_trainer_is_named_in_files_too(name: str, hint: str) -> None:
    assert field_of_spelling(name) == hint
    assert option_of_spelling("--stepps") == ""
