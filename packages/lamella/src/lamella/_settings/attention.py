"""Checks between `--attention` and other options, each refused in one line before anything starts."""

from collections.abc import Iterator

from lamella._settings.conflicts import exclusions
from lamella._settings.options import ConfigError
from lamella._settings.sections import DataConfig, ModelConfig, Packing, ParallelConfig


def check_attention(model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> None:
    """Refuse options that do not go with an implementation of attention.

    Raises:
        ConfigError: Names both options and a way out.
    """
    if data.packing != "auto":
        check_documents(data.packing, model)
    if (problem := next(_problems(model, parallel), None)) is not None:
        raise ConfigError(problem)


def check_documents(packing: Packing, model: ModelConfig) -> None:
    """Refuse attention within documents, where the documents of a sequence are not kept apart.

    Args:
        packing: How the run's documents become sequences.
        model: The settings of the model.

    Raises:
        ConfigError: Names both options and a way out.
    """
    if model.attention == "documents" and packing != "documents":
        raise ConfigError(
            f"Expected --attention documents with --packing documents, got --packing {packing}, whose sequences are "
            "one document to attention. Pass --attention auto."
        )


def _problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    if model.attention not in ("auto", "sdpa"):
        pieces = "--context-parallel, whose pieces of sequences attend by scaled_dot_product_attention"
        yield from exclusions(f"--attention {model.attention}", {pieces: parallel.context_parallel > 1})
    if model.attention == "documents":
        excluded = {
            "--tensor-parallel, which was not tried with it": parallel.tensor_parallel > 1,
            "--capture, whose batches must not differ in their documents": bool(parallel.capture),
        }
        yield from exclusions("--attention documents", excluded)
