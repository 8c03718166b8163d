"""A run's files and parts, for tests and benchmarks of other packages."""

from lamella._config import read_file as read_file
from lamella._config import resolve as resolve
from lamella._directory import RunDirectory as RunDirectory
from lamella._models import load_spec as load_spec
from lamella._report import StepRecord as StepRecord
from lamella._report import read as read_metrics
from lamella._tokens import BatchStream as BatchStream
from lamella._tokens import inputs_and_targets as inputs_and_targets
from lamella._tokens import load_tokens as load_tokens
from lamella._train import learning_rate as learning_rate
from lamella_transformers import build_model as build_model

__all__ = [
    "BatchStream",
    "RunDirectory",
    "StepRecord",
    "build_model",
    "inputs_and_targets",
    "learning_rate",
    "load_spec",
    "load_tokens",
    "read_file",
    "read_metrics",
    "resolve",
]
