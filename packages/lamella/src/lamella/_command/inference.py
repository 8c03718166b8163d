"""`lamella generate` and `lamella eval`: a trained model put to use by one process."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lamella._command.choices import number, one_of
from lamella._command.ckpt_options import DamageError
from lamella._command.inference_options import DEVICES
from lamella._inference.evaluation import Evaluation, EvaluationOptions, evaluate
from lamella._inference.generation import GenerationOptions, generate
from lamella._inference.tasks import score_lines, score_tasks, scores_of
from lamella._inference.trained_model import TrainedModel, choose_device, open_model
from lamella._record.output import check_destination, one_line, printable, refused_paths, say, show
from lamella._settings.options import ConfigError
from lamella_checkpoint import CheckpointDamaged, CheckpointMismatch

T = TypeVar("T")


def run_generate(arguments: argparse.Namespace) -> int:
    """Print a text that a trained model generates; return the exit code.

    Raises:
        ConfigError: The arguments, or the folder, are refused.
        DamageError: A file of the checkpoint is absent or damaged.
    """
    options = GenerationOptions(
        max_tokens=number("--max-tokens", arguments.max_tokens, int, at_least=1),
        temperature=_optional("--temperature", arguments.temperature, float),
        is_chat=arguments.chat,
        seed=number("--seed", arguments.seed, int) % 2**63,  # as many as torch's generators take
    )
    with _refused_models():
        trained = _open(arguments)
        generate(trained, arguments.prompt, options, lambda text: say([text], end=""))
    say([""])
    return 0


def run_eval(arguments: argparse.Namespace) -> int:
    """Print the loss of a trained model on text, or its scores in tasks; return the exit code.

    Raises:
        ConfigError: The arguments, the text or the folder are refused.
        DamageError: A file of the checkpoint is absent or damaged.
    """
    check_destination(arguments.json)
    options = EvaluationOptions(
        paths=tuple(arguments.data),
        sequence_length=_optional("--sequence-length", arguments.sequence_length, int, at_least=1),
        num_sequences=_optional("--sequences", arguments.sequences, int, at_least=1),
    )
    limit = _optional("--limit", arguments.limit, int, at_least=1)
    if limit is not None and not arguments.tasks:
        raise ConfigError(
            "Expected --tasks with --limit, a number of documents of a task, got none. For text pass --sequences."
        )
    report: dict[str, Any] = {}
    lines: list[str] = []
    with _refused_models(), refused_paths():
        trained = _open(arguments)
        if arguments.data or not arguments.tasks:
            evaluations = evaluate(trained, options)
            report |= _as_json(evaluations[0]) if len(evaluations) == 1 else {"texts": [*map(_as_json, evaluations)]}
            lines += [*evaluations[0].lines, *map(_line, evaluations)]
        if arguments.tasks:
            scores = scores_of(score_tasks(trained, arguments.tasks, limit=limit))
            report["tasks"] = scores
            lines += score_lines(scores)
    show(map(printable, lines), lambda: json.dumps(report, indent=2), arguments.json)
    return 0


def _open(arguments: argparse.Namespace) -> TrainedModel:
    device = choose_device(one_of("--device", arguments.device, DEVICES))
    return open_model(Path(arguments.model), _optional("--step", arguments.step, int), device)


@contextmanager
def _refused_models() -> Iterator[None]:
    try:
        yield
    except CheckpointDamaged as error:
        raise DamageError(one_line(f"{error}")) from error
    except CheckpointMismatch as error:
        raise ConfigError(one_line(f"{error}")) from error


def _optional(flag: str, text: str | None, kind: Callable[[str], T], *, at_least: float = 0) -> T | None:
    return None if text is None else number(flag, text, kind, at_least=at_least)


def _line(evaluation: Evaluation) -> str:
    record = evaluation.record
    size = f"{evaluation.num_sequences:,} sequences of {evaluation.sequence_length:,} tokens"
    return f"{record.nats:.4f} nats/{record.unit} on {evaluation.text} ({size})"


def _as_json(evaluation: Evaluation) -> dict[str, Any]:
    return {
        f"nats_per_{evaluation.record.unit}": evaluation.record.nats,
        "text": evaluation.text,
        "sequences": evaluation.num_sequences,
        "sequence_length": evaluation.sequence_length,
    }
