"""The sources of a run, read before anything is written: text, weights, and the checkpoint to go on from."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamella._data.sources import TextSource, data_lines, read_text
from lamella._model.trained_parameters import trained_line, trained_patterns
from lamella._model.weights import check_weights, weights_line
from lamella._settings.attention import check_documents
from lamella._settings.capture import check_capturable
from lamella._settings.config import Config
from lamella._settings.context_parallel import check_packing
from lamella._settings.options import ConfigError
from lamella._training.checks import CheckedRun
from lamella._training.resume import check_resumable, stream_settings
from lamella_transformers import NUM_PROFILER_WARMUP_STEPS, separates_documents


@dataclass(frozen=True, kw_only=True)
class RunSources:
    """The sources of a run.

    Attributes:
        text: The text and the tokenizer.
        stream: The settings to hold over a run, as `stream_settings` returns them.
        untrained: The names of pretrained tensors that the model has no modules for.
        first_step: Steps completed by the checkpoint to go on from; 0 for a new run.
    """

    text: TextSource
    stream: Mapping[str, object]
    untrained: tuple[str, ...]
    first_step: int


def read(config: Config, run: CheckedRun, lines: list[str]) -> RunSources:
    """Read the sources of a run, and check that they fit the settings and each other.

    Args:
        config: The run's settings.
        run: The run, checked.
        lines: The lines to print at the start; those on data, model and weights are added.

    Raises:
        ConfigError: The text, the weights or the checkpoint does not fit.

    Effects: reads all text once, and the heads of the weights; writes nothing.
    """
    model = run.model
    text = read_text(
        config.data,
        model.pretrained,
        model.spec.vocab_size,
        separates_documents=separates_documents(model.outline),
        without=run.directory.root,
    )
    check_packing(text.form.packing, config.parallel)
    check_documents(text.form.packing, config.model)
    check_capturable(text.form.packing, config.parallel, has_answers=text.form.has_answers)
    lines += [
        f"data: {text.corpus.describe()}",
        model.describe(),
        *trained_line(model.checkpointed, trained_patterns(config)),
        *data_lines(text),
    ]
    untrained: tuple[str, ...] = ()
    first_step = 0
    stream = stream_settings(config, text.form.packing)
    if run.checkpoint is not None:
        first_step = check_resumable(run.checkpoint, model, stream, text.fingerprint, run.directory)
    if model.pretrained is not None and lacks_model(run):
        untrained = check_weights(model.pretrained, model.outline, model.spec)
        if run.checkpoint is None:
            lines.append(weights_line(model.pretrained, untrained))
    return RunSources(text=text, stream=stream, untrained=untrained, first_step=first_step)


def lacks_model(run: CheckedRun) -> bool:
    """Return True where the run's folder is without its model: in a new run, and on a host new to a run."""
    return run.checkpoint is None or not run.directory.model_config.is_file()


def check_profile(config: Config, first_step: int) -> None:
    """Refuse to profile more steps than remain.

    Raises:
        ConfigError: Names `--profile`, and the number of steps that remain.
    """
    needed = 0 if config.run.profile is None else NUM_PROFILER_WARMUP_STEPS + config.run.profile
    if needed > config.optim.steps - first_step:
        raise ConfigError(
            f"Expected at least {needed} steps to go for --profile {config.run.profile}, which begins after "
            f"{NUM_PROFILER_WARMUP_STEPS}, got {config.optim.steps - first_step}. Pass a larger --steps, or a smaller "
            "--profile."
        )
