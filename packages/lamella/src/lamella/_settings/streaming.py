"""Checks between `--streaming` and options that need the length of the text, or a part of it."""

from collections.abc import Iterator, Mapping, Sequence

from lamella._settings.options import ConfigError
from lamella._settings.sections import DataConfig, OptimConfig


def check_streaming(data: DataConfig, optim: OptimConfig) -> None:
    """Refuse options that a text without a known length cannot serve.

    Raises:
        ConfigError: Names both options and a way out.
    """
    problems = _problems(data, optim) if data.streaming else _without_streaming(data)
    if (problem := next(problems, None)) is not None:
        raise ConfigError(problem)


def _without_streaming(data: DataConfig) -> Iterator[str]:
    if data.shuffle_buffer != DataConfig.shuffle_buffer:
        yield (
            f"Expected --streaming with --shuffle-buffer, got --shuffle-buffer {data.shuffle_buffer} alone: prepared "
            "text is shuffled as a whole. Pass --streaming, or leave --shuffle-buffer out."
        )


def _problems(data: DataConfig, optim: OptimConfig) -> Iterator[str]:
    if optim.epochs is not None:
        yield (
            f"Expected --steps with --streaming, which does not know the length of the text, got --epochs "
            f"{optim.epochs}. Pass --steps; the text begins anew when it ends."
        )
    if not data.validation_paths:
        yield (
            "Expected --validation-data with --streaming, which can hold out no share of a text of unknown length, got "
            "none. Pass texts to validate on."
        )


def check_steps(layers: Sequence[Mapping[str, Mapping[str, object]]]) -> None:
    """Refuse settings that stream, and leave the number of steps to its default.

    Args:
        layers: The settings of a user, later layers over earlier layers.

    Raises:
        ConfigError: Names both options.
    """
    streaming = [layer["data"]["streaming"] for layer in layers if "streaming" in layer.get("data", {})]
    lengths = [name for layer in layers for name in layer.get("optim", {}) if name in ("steps", "epochs")]
    if streaming and streaming[-1] is True and not lengths:
        raise ConfigError(
            "Expected --steps with --streaming, which does not know the length of the text, got none. Pass the number "
            "of steps in all."
        )
