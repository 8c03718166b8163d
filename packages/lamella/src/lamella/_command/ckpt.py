"""`lamella ckpt`: checkpoints of any format listed, compared, converted and checked, by one process without a GPU."""

import argparse
import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch

import lamella_checkpoint  # By attribute below: a name that a command does not use is not imported.
import lamella_convert
from lamella._command.choices import number, one_of
from lamella._command.ckpt_options import DIALECTS, DTYPES, MTP_LAYERS, NUM_LINES, TARGETS, DamageError
from lamella._record.output import check_destination, file_error, one_line, printable, say, show
from lamella._record.progress import ByteBar
from lamella._settings.options import ConfigError, in_short
from lamella._settings.parsing import kind_of, parse_json, read_settings
from lamella._settings.sizes import nbytes_of, size
from lamella_checkpoint import CheckpointDamaged, CheckpointUntrusted, FormatUnknown, Source
from lamella_convert import ModelUnknown, SizeUnknown

if TYPE_CHECKING:
    from lamella_convert import Conversion, Diff, Inspection, MtpLayer, Target

_DIFFERS, _DAMAGED = 1, 1
_NUM_NAMED: Final = 5


def run(arguments: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit code.

    Raises:
        ConfigError: The command is refused.
        DamageError: A checkpoint is not whole.

    Effects: no collective, no accelerator.
    """
    try:
        with _without_collections():
            return _RUNS[arguments.ckpt_command](arguments)
    except ModelUnknown as error:
        raise ConfigError(_no_family(error)) from error
    except SizeUnknown as error:
        raise ConfigError(_no_size(error)) from error
    except FormatUnknown as error:
        raise ConfigError(one_line(f"{error}{_checkpoint_within(error)}")) from error
    except (CheckpointUntrusted, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointDamaged) and not isinstance(error, CheckpointUntrusted):
            raise DamageError(one_line(f"{error}")) from error
        raise ConfigError(one_line(f"{error}")) from error
    except OSError as error:
        raise ConfigError(_system_message(error, arguments)) from error
    except MemoryError as error:
        raise ConfigError(f"Expected memory for what is in hand, got too little. {error}".strip()) from error


def _no_family(error: ModelUnknown) -> str:
    model_types = ", ".join(error.known) or "none"
    return (
        f"Expected a model type whose rules a package has, got {error.model_type!r}. Known: {model_types}. Packages "
        f"with rules are extras. Qwen3.5's, from a clone: uv pip install './packages/lamella[qwen]'"
    )


def _no_size(error: SizeUnknown) -> str:
    if error.size == "tp":
        return (
            f"Expected --tp, how many tensor-parallel ranks there were or will be, got none. {error.needed_for!r} lies "
            f"in their order, which the checkpoint does not tell."
        )
    return (
        f"Expected --config, the model's config.json or the folder that has it, got none that tells {error.size!r}. "
        f"{error.needed_for!r} is taken apart by it."
    )


def _names_target(error: OSError, arguments: argparse.Namespace) -> bool:
    """True for an existing file at the path to write, False for a file at the path of its folder."""
    return error.filename is None or Path(error.filename).resolve() == Path(arguments.dst).resolve()


def _checkpoint_within(error: FormatUnknown) -> str:
    """Return a way out for the folder of a run or of checkpoints: the newest checkpoint."""
    folders = (Path(error.file), Path(error.file, "checkpoints"))
    newest = next(
        (checkpoint for folder in folders if (checkpoint := lamella_checkpoint.CheckpointDirectory(folder).latest())),
        None,
    )
    return f" The newest checkpoint in it is {str(newest)!r}." if newest else ""


def _system_message(error: OSError, arguments: argparse.Namespace) -> str:
    is_occupied = isinstance(error, FileExistsError) and not arguments.force and _names_target(error, arguments)
    return file_error(error) + (" With --force a checkpoint there is replaced." if is_occupied else "")


# -- commands ---------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    inspection = lamella_convert.inspect(arguments.path, trust=arguments.trust)
    depth = None if arguments.depth is None else number("--depth", arguments.depth, int)
    lines = inspection.lines(depth=depth) if depth is not None or not sys.stdout.isatty() else _at_a_glance(inspection)
    show(lines, lambda: json.dumps(inspection.as_json(), indent=2), arguments.json)
    return 0


def _at_a_glance(inspection: "Inspection") -> Iterator[str]:
    """Return the lines of all tensors, or of the deepest level within a screen or two."""
    lines = [*inspection.lines()]
    if len(lines) <= NUM_LINES:
        return iter(lines)
    depth, shown = 1, [*inspection.lines(depth=1)]
    while len(deeper := [*inspection.lines(depth=depth + 1)]) <= NUM_LINES:
        depth, shown = depth + 1, deeper
    return iter([*shown, f"{len(lines):,} lines in all; these are --depth {depth}"])


def _diff(arguments: argparse.Namespace) -> int:
    check_destination(arguments.json)
    rtol, atol = (number(f"--{name}", getattr(arguments, name), float) for name in ("rtol", "atol"))
    limit = number("--limit", arguments.limit, int)
    tp = _tensor_parallel_size(arguments)
    with _config_folder(arguments.config) as like, ByteBar("comparing") as bar:
        sources = lamella_convert.open_both(
            arguments.a, arguments.b, like=like, tensor_parallel_size=tp, trust=arguments.trust
        )
        diff = lamella_convert.diff(*sources, values=not arguments.names_only, rtol=rtol, atol=atol, on_progress=bar.to)
    show(_differences(diff, limit), lambda: json.dumps(diff.as_json(), indent=2), arguments.json)
    return _DIFFERS if diff else 0


def _differences(diff: "Diff", limit: int) -> Iterator[str]:
    yield from islice(diff.lines(), limit)
    num_hidden = len(diff.differences) - limit
    if num_hidden > 0:
        yield f"and {num_hidden} more"
    yield f"{len(diff.differences)} differences, {diff.num_equal} names are equal: {diff.a} (a), {diff.b} (b)"


def _convert(arguments: argparse.Namespace) -> int:
    to = cast("Target", one_of("--to", arguments.to, TARGETS))
    for flag in ("--dialect", "--mtp-layer", "--padded-vocab"):
        if to != "fsdp_dtensor" and getattr(arguments, flag[2:].replace("-", "_")) is not None:
            raise ConfigError(f"Expected {flag} with --to fsdp_dtensor only, got --to {to}. Leave {flag} out.")
    if to != "hf" and arguments.float8:
        raise ConfigError(f"Expected --float8 with --to hf only, got --to {to}. Leave --float8 out.")
    dtype = None if arguments.dtype is None else getattr(torch, DTYPES[one_of("--dtype", arguments.dtype, DTYPES)])
    dialect = one_of("--dialect", arguments.dialect or DIALECTS[0], DIALECTS)
    layer_name = arguments.mtp_layer
    mtp_layer = None if layer_name is None else cast("MtpLayer", one_of("--mtp-layer", layer_name, MTP_LAYERS))
    megatron = lamella_convert.MegatronOptions(
        dialect=dialect,
        mtp_layer=mtp_layer,
        tensor_parallel_size=_tensor_parallel_size(arguments),
        padded_vocabulary=_optional_number("--padded-vocab", arguments.padded_vocab),
    )
    max_shard_nbytes = _max_shard_nbytes(arguments.max_shard_size)
    with _config_folder(arguments.config) as like, ByteBar("writing") as bar:
        done = lamella_convert.convert(
            arguments.src,
            arguments.dst,
            to=to,
            translate=_as_published(arguments.config) if to == "hf" else None,
            dtype=dtype,
            float8=arguments.float8,
            like=like,
            megatron=megatron,
            max_shard_nbytes=max_shard_nbytes,
            replace=arguments.force,
            on_progress=bar.to,
            trust=arguments.trust,
            verify=arguments.verify,
        )
    say(map(printable, _report_lines(done)))
    return 0


def _as_published(config: str | None) -> Callable[[Source], Source] | None:
    """Return the translation to published names, if `--config` names the model folder of a run."""
    if config is None or not (Path(config) / "lamella_published.json").is_file():
        return None
    from lamella._model.weights import as_published

    return as_published(Path(config))


def _report_lines(done: "Conversion") -> Iterator[str]:
    yield f"{done.target}: {done.to}, {done.num_tensors} tensors of {size(done.nbytes)}, from {done.source}"
    if done.side_files:
        yield f"beside them: {', '.join(done.side_files)}"
    elif done.to == "hf":
        yield "beside them: nothing; --config FOLDER takes a model's configuration and tokenizer along"
    if done.untrained:
        yield f"as they were published, not trained: {_first(done.untrained)}"
    if done.left:
        yield f"left out: {_first(done.left)}"
    if done.originals:
        yield f"lose bits around zero, and are kept beside for the way back: {_first(done.originals)}"
    if done.absent:
        yield f"published before, and absent now: {_first(done.absent)}"
    if done.inexact:
        inexact = tuple(f"{name} ({why})" for name, why in done.inexact.items())
        yield f"not exact: {_first(inexact)}"


def _verify(arguments: argparse.Namespace) -> int:
    check_destination(arguments.json)
    with ByteBar("reading") as bar:
        verification = lamella_convert.verify(arguments.path, trust=arguments.trust, on_progress=bar.to)
    show(verification.lines(), lambda: json.dumps(verification.as_json(), indent=2), arguments.json)
    return 0 if verification else _DAMAGED


_RUNS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "inspect": _inspect,
    "diff": _diff,
    "convert": _convert,
    "verify": _verify,
}


# -- shared by the commands --------------------------------------------------------------------------------------------


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause garbage collections.

    They walk the tables of 300,000 tensors for one to three seconds; a command leaves 8,000 small objects in cycles.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def _config_folder(path: str | None) -> Iterator[Path | None]:
    """Yield the folder of `--config`; for a lone file, a folder with a copy of the file alone.

    Raises:
        ConfigError: There is no such file, or a lone file is no JSON object.
    """
    if path is None:
        yield None
        return
    config = Path(path)
    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():
        raise ConfigError(f"Expected a config.json as --config, or a folder that has one, got {path!r}.")
    if config.is_dir():
        yield config
        return
    try:  # A copy that cannot be read would be reported as damage, by the name of a temporary file.
        content = parse_json(read_settings(file))
        if not isinstance(content, dict):
            raise ValueError(kind_of(content))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Expected a JSON object in {path!r} as --config, got {in_short(error)}") from error
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(file, Path(folder) / "config.json")
        yield Path(folder)


def _tensor_parallel_size(arguments: argparse.Namespace) -> int | None:
    return _optional_number("--tp", arguments.tp)


def _optional_number(flag: str, text: str | None) -> int | None:
    return None if text is None else number(flag, text, int, at_least=1)


def _max_shard_nbytes(text: str) -> int:
    nbytes = nbytes_of(text, "--max-shard-size")
    if nbytes < 1:
        raise ConfigError(f"Expected --max-shard-size of at least 1 byte, got {text!r}. Pass a size such as 5GB.")
    return nbytes


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return f"{shown} and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else shown
