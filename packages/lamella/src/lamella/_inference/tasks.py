"""Scores of a trained model in tasks of lm-eval."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from lamella._inference.trained_model import TrainedModel
from lamella._settings.options import ConfigError, in_short


def score_tasks(trained: TrainedModel, tasks: Sequence[str], *, limit: int | None) -> dict[str, Any]:
    """Return the results of lm-eval's tasks, in the form of its `simple_evaluate`.

    Args:
        trained: The model.
        tasks: Names of tasks.
        limit: Documents of each task, at most; None for all.

    Raises:
        ConfigError: lm-eval is not installed, or refuses the tasks.

    Effects: lm-eval may download the tasks' data sets.
    """
    try:
        evaluator = importlib.import_module("lm_eval")
        models = importlib.import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise ConfigError(
            f"Expected lm-eval to be installed for --tasks, got {in_short(error)} Install it from a clone: uv pip "
            "install './packages/lamella[eval]'"
        ) from error
    try:
        language_model = models.HFLM(pretrained=trained.model, tokenizer=trained.tokenizer.tokenizer)
        evaluation = evaluator.simple_evaluate(model=language_model, tasks=list(tasks), limit=limit)
    except Exception as error:  # Tasks are foreign code and data.
        raise ConfigError(f"Expected tasks that lm-eval can run, got: {in_short(error)}") from error
    return dict(evaluation or {})


def scores_of(evaluation: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the metrics in results of lm-eval: task -> metric -> number; a standard error is a further metric."""
    return {
        task: {
            name.removesuffix(",none"): float(score)
            for name, score in metrics.items()
            if "," in name and isinstance(score, int | float)  # metric,filter; `sample_len` counts documents
        }
        for task, metrics in evaluation.get("results", {}).items()
    }


def score_lines(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line a task and metric, with the standard error if known."""
    return [
        f"{task}  {name}: {score:.4f}{_deviation(metrics, name)}"
        for task, metrics in scores.items()
        for name, score in metrics.items()
        if "_stderr" not in name
    ]


def _deviation(metrics: Mapping[str, float], name: str) -> str:
    metric, comma, filter_name = name.partition(",")
    deviation = metrics.get(f"{metric}_stderr{comma}{filter_name}")
    return "" if deviation is None else f" +- {deviation:.4f}"
