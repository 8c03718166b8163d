"""`report.html`: a run on one page, made from the run's files alone, at any time."""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Final

from lamella._record.curves import chart, shown_number
from lamella._record.history import read_history, recorded_start
from lamella._record.output import printable
from lamella._record.page import Html, element, folded, page, section, table
from lamella._record.run_directory import RunDirectory
from lamella._record.series import Series, is_step, metric_rows, step_fields, step_series, validation_series
from lamella._settings.config import GROUPS, Values
from lamella._settings.options import fields_of
from lamella._settings.sizes import size

_TRAINING_UNIT: Final = "nats/token"
_NUM_LOSSES: Final = 5
_SPEED: Final = "tokens_per_s"

Rows = Sequence[Mapping[str, object]]


@contextmanager
def reported_run(
    directory: RunDirectory, facts: Mapping[str, object], print_line: Callable[[str], object]
) -> Iterator[None]:
    """Record the start and the end of a run in its history, and write the page on it after the block.

    Args:
        directory: The run's files.
        facts: Facts of the start: the first step, the number of ranks, the device.
        print_line: Called with a line on a page that cannot be written; the run's outcome stays.
    """
    try:
        with recorded_start(directory.history, facts):
            yield
    finally:
        try:
            write_report(directory)
        except OSError as error:
            print_line(f"report: {error.strerror or error}: {directory.report}")


def write_report(directory: RunDirectory) -> Path:
    """Write the page on a run, whole or not at all, and return its path.

    Raises:
        OSError: A file cannot be read or written.

    Effects: reads the run's settings, metrics, history and profile; no collective.
    """
    partial_file = directory.report.with_name(f"{directory.report.name}.partial")
    # A path may have bytes that are no UTF-8, which the page shows as escapes.
    partial_file.write_text(report(directory), encoding="utf-8", errors="backslashreplace")
    partial_file.replace(directory.report)
    return directory.report


def report(directory: RunDirectory) -> str:
    """Return the page on a run; of files that are absent or damaged, their sections are left out.

    Raises:
        OSError: A file cannot be read.
    """
    name = printable(directory.root.resolve().name)
    settings, rows, history = (
        _settings(directory.config),
        metric_rows(directory.metrics),
        read_history(directory.history),
    )
    sections = (
        _losses(rows),
        _optimization(rows),
        _throughput(rows),
        _phases(rows),
        _profile(directory.profile),
        _samples(rows),
        _configuration(settings),
        _history(history),
        _commands(directory.root, settings),
    )
    model = printable(str(settings.get("model", {}).get("name", "")))
    heading = element("h1", name), element("p", f"{model} · {_state(history, rows)}", class_="dim")
    return page(f"{name}: run of lamella train", *heading, _figures(settings, rows), *filter(None, sections))


def _settings(path: Path) -> Values:
    """Return the settings of a run as its file has them; none of a damaged file."""
    settings: object = {}
    with suppress(FileNotFoundError, ValueError):
        settings = json.loads(path.read_text(encoding="utf-8"))
    groups = settings.items() if isinstance(settings, dict) else ()
    return {group: fields for group, fields in groups if isinstance(fields, dict)}


def _state(history: Rows, rows: Rows) -> str:
    step = rows[-1]["step"] if rows else 0
    last = history[-1] if history else {}
    if last.get("event") == "end":
        return f"{printable(str(last.get('reason')))} at step {step:,}, {last.get('time')}"
    return f"at step {step:,}" + (f", started {last.get('time')}, in progress or killed" if last else "")


# -- figures and charts -----------------------------------------------------------------------------------------------


def _figures(settings: Values, rows: Rows) -> Html:
    last = next((row for row in reversed(rows) if is_step(row)), {})
    steps = settings.get("optim", {}).get("steps")
    speeds, shares, sizes = (step_series(rows, name, "", "").numbers for name in (_SPEED, "mfu", "memory_nbytes"))
    shown = {
        "steps": f"{last.get('step', 0):,}" + (f" of {steps:,}" if isinstance(steps, int) else ""),
        "training loss": _with_unit(last.get("loss"), _TRAINING_UNIT),
        **{series.name: _with_unit(series.numbers[-1], series.unit) for series in validation_series(rows)},
        "tokens/s": _with_unit(median(speeds) if speeds else None, ""),
        "MFU": f"{median(shares):.1%}" if shares else "",
        "peak memory of a rank": size(int(max(sizes))) if sizes else "",
    }
    tiles = (
        element("div", element("span", name, class_="dim"), element("b", text)) for name, text in shown.items() if text
    )
    return element("div", *tiles, class_="figures")


def _with_unit(number: object, unit: str) -> str:
    return f"{shown_number(number)} {unit}".rstrip() if isinstance(number, int | float) else ""


def _charts(title: str, *charts: Html) -> Html:
    drawn = [*filter(None, charts)]
    return section(title, element("div", *drawn, class_="charts")) if drawn else Html()


def _losses(rows: Rows) -> Html:
    """Return the losses, in a chart a unit: of training and of each held-out set."""
    by_unit: dict[str, list[Series]] = {_TRAINING_UNIT: [step_series(rows, "loss", "training", _TRAINING_UNIT)]}
    for series in validation_series(rows):
        by_unit.setdefault(series.unit, []).append(series)
    titles = {_TRAINING_UNIT: "Loss"}
    return _charts("Losses", *(chart(titles.get(unit, "Validation loss"), group) for unit, group in by_unit.items()))


def _optimization(rows: Rows) -> Html:
    return _charts(
        "Learning rate and gradient",
        chart("Learning rate", [step_series(rows, "lr", "learning rate", "")], may_be_log=False),
        chart("Gradient norm before clipping", [step_series(rows, "grad_norm", "gradient norm", "")]),
    )


def _throughput(rows: Rows) -> Html:
    return _charts(
        "Throughput",
        chart("Tokens per second", [step_series(rows, _SPEED, "throughput", "tokens/s, all ranks")], from_zero=True),
        chart("MFU", [_scaled(step_series(rows, "mfu", "MFU", "% of the peak"), 100)], from_zero=True),
    )


def _phases(rows: Rows) -> Html:
    """Return memory and time by the phases that the records name: fields in bytes, and in seconds."""
    memory = [_scaled(step_series(rows, name, _phase(name), "GiB"), 2**-30) for name in step_fields(rows, "_nbytes")]
    seconds = [step_series(rows, name, _phase(name), "s") for name in step_fields(rows, "_s") if name != _SPEED]
    return _charts(
        "Memory and time by phase",
        chart("Peak memory of a rank", memory, from_zero=True),
        chart("Seconds", seconds, from_zero=True),
    )


def _phase(field: str) -> str:
    return field.removesuffix("_nbytes").removesuffix("_s").replace("_", " ")


def _scaled(series: Series, factor: float) -> Series:
    points = tuple((step, factor * number) for step, number in series.points)
    return Series(name=series.name, unit=series.unit, points=points)


# -- tables -----------------------------------------------------------------------------------------------------------


def _profile(folder: Path) -> Html:
    """Return the largest losses of a profiled step, and lamella-trace's tables."""
    try:
        profile = json.loads((folder / "overlap.json").read_text(encoding="utf-8"))
        text = (folder / "overlap.txt").read_text(encoding="utf-8")
        verdict, losses = str(profile["verdict"]), profile["losses"][:_NUM_LOSSES]
        rows = [(str(loss["name"]), f"{loss['ms']:.2f}", str(loss["advice"])) for loss in losses]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return Html()
    timeline = element("a", "Timeline and tables", href=f"{folder.name}/overlap.html")
    parts = [element("p", verdict)]
    if rows:
        parts.append(table(("largest losses of a step", "ms", "advice"), rows))
    return section(
        "Exposed communication and compute losses",
        *parts,
        folded("All units, in milliseconds", element("pre", text)),
        element("p", timeline),
    )


def _samples(rows: Rows) -> Html:
    """Return the continuations of prompts, the newest first; earlier steps are folded."""
    by_step: dict[object, list[Html]] = {}
    for row in rows:
        if isinstance(prompt := row.get("prompt"), str) and isinstance(text := row.get("text"), str):
            by_step.setdefault(row["step"], []).append(element("pre", element("b", prompt), text, class_="text"))
    if not by_step:
        return Html()
    (step, newest), *earlier = reversed(by_step.items())
    older = (part for step, texts in earlier for part in (element("p", f"Step {step:,}"), *texts))
    return section(f"Samples at step {step:,}", *newest, *([folded("Earlier samples", *older)] if earlier else []))


def _configuration(settings: Values) -> Html:
    """Return the settings that differ from the defaults, and all of them folded."""
    if not settings:
        return Html()
    defaults = {(group, field.name): field for group, cls in GROUPS.items() for field in fields_of(cls)}
    differing = [
        (defaults[group, name].flag, _as_text(setting), _as_text(_default(defaults[group, name].default)))
        for group, fields in settings.items()
        for name, setting in fields.items()
        if (group, name) in defaults and _plain(setting) != _plain(defaults[group, name].default)
    ]
    return section(
        "Configuration",
        table(("option", "setting", "default"), differing),
        folded("All settings", element("pre", json.dumps(settings, indent=2, ensure_ascii=False))),
    )


def _plain(setting: object) -> object:
    return [*setting] if isinstance(setting, tuple) else setting


def _default(default: object) -> object:
    """Return a default for a reader: None for a field without one."""
    return default if isinstance(default, str | int | float | tuple) else None


def _as_text(setting: object) -> str:
    if isinstance(setting, list | tuple):
        return printable(" ".join(map(str, setting))) or "none"
    names: Mapping[object, str] = {True: "yes", False: "no", None: "none"}
    return names[setting] if setting is None or isinstance(setting, bool) else printable(str(setting))


def _history(history: Rows) -> Html:
    """Return the versions of the last start, and all starts and ends."""
    starts = [event for event in history if event.get("event") == "start"]
    if not starts:
        return Html()
    versions = starts[-1].get("versions")
    pairs = versions.items() if isinstance(versions, dict) else ()
    return section(
        "Versions, starts and ends",
        element("p", ", ".join(f"{name} {version}" for name, version in pairs)),
        table(("time (UTC)", "event", ""), map(_event_row, history)),
    )


def _event_row(event: Mapping[str, object]) -> tuple[str, str, str]:
    if event.get("event") == "end":
        return str(event.get("time")), "end", printable(str(event.get("reason")))
    step = event.get("step")
    verb = f"resume from step {step}" if step else "start"
    ranks = event.get("ranks")
    details = f"{ranks} rank{'' if ranks == 1 else 's'} on {event.get('device')}"
    return str(event.get("time")), verb, details


def in_shell(path: str) -> str:
    """Return a path as a shell and the commands in it read it: none that begins with a dash, as options do."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _commands(root: Path, settings: Values) -> Html:
    run = in_shell(os.path.relpath(root))
    has_adapters = settings.get("model", {}).get("lora_rank") is not None
    commands = {
        f"lamella export {run}": "a folder for peft" if has_adapters else "a Hugging Face folder",
        f'lamella generate {run} "..."': "text after a prompt",
        f"lamella eval {run}": "the loss on the text that was held out",
        f"lamella train --config {run}/config.json --run-dir {run}": "more training; with --steps beyond the end",
        f"lamella report {run}": "this page again, of the newest records",
    }
    rows = ((element("code", printable(command)), effect) for command, effect in commands.items())
    return section("Next", table(("command", "effect"), rows))
