"""The plot of a run's losses."""

from collections.abc import Iterable
from pathlib import Path

from lamella._record.metrics import Record, StepRecord, ValidationRecord


def plot(records: Iterable[Record], path: Path) -> None:
    """Draw training loss (nats per token) and validation loss (nats per byte, or per token) over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    every = list(records)
    steps = [record for record in every if isinstance(record, StepRecord)]
    validations = [record for record in every if isinstance(record, ValidationRecord)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes = figure.add_subplot(xlabel="step", ylabel="training loss (nats/token)")
    validation_axes = loss_axes.twinx()
    validation_axes.set_ylabel(f"validation loss (nats/{validations[0].unit if validations else 'byte'})")
    lines = loss_axes.plot([r.step for r in steps], [r.loss for r in steps], color="tab:blue", lw=1, label="training")
    for index, title in enumerate(dict.fromkeys(record.title for record in validations)):
        records_of_set = [record for record in validations if record.title == title]
        lines += validation_axes.plot(
            [r.step for r in records_of_set],
            [r.nats for r in records_of_set],
            "o-",
            color=f"C{index + 1}",  # matplotlib's second colour, tab:orange, and those after it
            label=title,
        )
    loss_axes.set_ylim(bottom=0)
    validation_axes.set_ylim(bottom=0)
    loss_axes.legend(handles=lines)
    figure.savefig(path, dpi=120)
