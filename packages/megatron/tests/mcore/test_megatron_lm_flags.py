"""Every flag about wrappers of the installed parser is in the reference, and is answered as the reference says."""

from __future__ import annotations

import argparse
import copy
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import megatron_lm
import pytest
from megatron_lm import SHARDED

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "megatron_fsdp.md"
ABOUT_WRAPPERS = re.compile(
    r"fsdp|hsdp|ddp-|sharding-strategy|param-gather|grad-reduce|nccl-ub|symmetric-reg|div-fusion|distributed-optimizer|"
    r"meta-device|check-for-nan|check-for-large|allreduce-grads|transpose-cache|communication-unit|precision-aware|"
    r"main-param|main-grad|exp-avg|double-buffer"
)
KINDS = {"used", "without effect", "refused"}


@pytest.fixture(scope="module", autouse=True)
def programs(on_cpu: None) -> Iterator[None]:
    with megatron_lm.programs_on_cpu():
        yield


@cache
def _table() -> dict[str, str]:
    """The kind of each flag."""
    section = PAGE.read_text().split("## On Megatron-LM's command line")[1].split("\n## ")[0]
    rows = [row.split("|")[1:3] for row in section.splitlines() if row.startswith("| `--")]
    return {flag: kind.strip() for flags, kind in rows for flag in re.findall(r"`(--[^`]+)`", flags)}


@cache
def _flags() -> dict[str, argparse.Action]:
    """The parser's flags about wrappers, without second spellings."""
    arguments = importlib.import_module("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = [action for action in parser._actions if action.option_strings]
    return {action.option_strings[0]: action for action in actions if ABOUT_WRAPPERS.search(action.option_strings[0])}


def test_the_reference_has_each_flag_of_the_parser_and_no_other() -> None:
    assert _table().keys() == _flags().keys()
    assert set(_table().values()) == KINDS


def test_flags_are_refused_that_the_reference_says_are() -> None:
    args = megatron_lm.parsed(*SHARDED)
    refused = {flag for flag, action in _flags().items() if _is_refused(copy.deepcopy(args), action)}
    by_the_wrapper = {"--init-model-with-meta-device"}  # by the parameters
    elsewhere = {"--use-torch-fsdp2"}  # makes another configuration
    assert refused | by_the_wrapper == {flag for flag, kind in _table().items() if kind == "refused"} - elsewhere


def _is_refused(args: Any, action: argparse.Action) -> bool:
    """Whether the arguments are refused with another value of a flag."""
    from lamella_megatron._driver.optimizer import _REFUSED
    from lamella_megatron._model.configuration import check_options

    training = importlib.import_module("megatron.training.training")
    if action.dest == "use_torch_fsdp2":
        return False
    setattr(args, action.dest, _another_value(action))
    try:
        check_options(training.get_megatron_ddp_config(args))
    except ValueError:
        return True
    return action.dest in _REFUSED  # by the optimizer


def _another_value(action: argparse.Action) -> Any:
    """A value that is not the default."""
    values = {"outer_dp_sharding_strategy": "optim", "megatron_fsdp_main_params_dtype": None}
    if isinstance(action.default, bool):
        return not action.default
    if action.dest.endswith("dtype"):
        return importlib.import_module("torch").bfloat16
    if isinstance(action.default, list):
        return ["decoder.*"]
    if action.choices:
        return next(choice for choice in action.choices if choice != action.default)
    return values.get(action.dest, 2)
