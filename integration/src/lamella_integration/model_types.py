"""Every causal model type of transformers through `lamella train`'s own parts, beside transformers: a table.

    python -m lamella_integration.model_types --page docs/reference/model-types.md [type ...]

A tiny model of each type is saved by transformers. Two ranks read their shards from the folder and train a few steps
of two microbatches, with other numbers of targets on each rank. transformers trains the same model whole. Compared are
the losses of all steps, and the logits of the exported folder as transformers opens it.
"""

import argparse
import contextlib
import datetime as dt
import io
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lamella_optim
from lamella import save
from lamella.cli import main as lamella_main
from lamella.testing import ConfigError, build, check_model, check_weights, resolve
from lamella_convert import keep_published
from lamella_engine import FSDPModule
from lamella_integration.tiny_configs import VOCAB_SIZE, tiny_config
from lamella_testing import RankFailure, run_ranks
from lamella_transformers import IGNORED, ModelLoss, balance_coefficient, choose_loss

_NUM_RANKS: Final = 2
_NUM_STEPS: Final = 3
_ACCUMULATION: Final = 2
_LENGTH: Final = 24
_TOLERANCE: Final = 1e-6
_LARGEST_NUMEL: Final = 8_000_000
_CPU: Final = torch.device("cpu")

Microbatch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, (sequences, positions) int64."""


@dataclass(frozen=True, kw_only=True)
class TypeRow:
    """The outcome of a model type.

    Attributes:
        model_type: The name in transformers.
        outcome: "exact", "differs", "refused", "failed" (an error that is no refusal), or "not built" by transformers
            with the tiny sizes.
        difference: The largest difference of a loss or a logit, by the largest one; None without a training.
        detail: The loss that was chosen, or the reason.
    """

    model_type: str
    outcome: str
    difference: float | None = None
    detail: str = ""

    def line(self) -> str:
        """Return a row of the table."""
        difference = "" if self.difference is None else f"{self.difference:.0e}"
        return f"| {self.model_type} | {self.outcome} | {difference} | {self.detail.replace('|', '/')} |"


def main() -> None:
    """Run the types one after another; print their rows, and write the page. Exit with 1 if a type differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--rows", type=Path, help="JSON lines of rows, of an earlier call too, which are not run again")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = _earlier(options.rows)
    for model_type in options.types or causal_types():
        if model_type not in rows:
            rows[model_type] = row = check_type(model_type)
            print(row.line(), flush=True)
            if options.rows is not None:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    if options.page is not None:
        options.page.write_text(page(sorted(rows.values(), key=lambda row: row.model_type)), encoding="utf-8")
    if any(row.outcome in ("differs", "failed") for row in rows.values()):
        raise SystemExit(1)


def _earlier(file: Path | None) -> dict[str, TypeRow]:
    if file is None or not file.exists():
        return {}
    rows = [TypeRow(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row.model_type: row for row in rows}


def causal_types() -> list[str]:
    """Return the model types of transformers' causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def check_type(model_type: str) -> TypeRow:
    """Train and export a tiny model of a type by lamella and by transformers, and compare."""
    with TemporaryDirectory() as folder:
        names = ("hf", "checkpoint", "model", "out")
        published, checkpoint, config_folder, exported = (Path(folder, name) for name in names)
        try:
            _publish(model_type, published)
        except Exception as error:  # noqa: BLE001  transformers raises what its parts raise.
            return TypeRow(model_type=model_type, outcome="not built", detail=_in_short(error))
        try:
            losses, detail = _train(published, checkpoint)
            config_folder.mkdir()
            keep_published(published, config_folder, untrained=(), dtype=torch.float32)
            _export(checkpoint, exported, config_folder)
            expected = _trained_by_transformers(published)
            difference = expected.difference(_TrainingOutcome(losses, _logits(_opened(exported))))
            sensitivity = 0.0
            if difference > _TOLERANCE:
                sensitivity = max(expected.difference(_trained_by_transformers(published, seed)) for seed in (1, 2, 3))
                detail += (
                    f"; {sensitivity:.0e} between two trainings in transformers whose weights differ in the last bit"
                )
        except ConfigError as error:
            return TypeRow(model_type=model_type, outcome="refused", detail=_without(folder, f"{error}"))
        except Exception as error:  # noqa: BLE001  The table counts tracebacks.
            return TypeRow(model_type=model_type, outcome="failed", detail=_without(folder, _in_short(error)))
        outcome = "exact" if difference <= max(_TOLERANCE, 3 * sensitivity) else "differs"
        return TypeRow(model_type=model_type, outcome=outcome, difference=difference, detail=detail)


def _publish(model_type: str, folder: Path) -> None:
    """Save a tiny model, if transformers can build and run it."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        numel = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())  # type: ignore[no-untyped-call]
    if numel > _LARGEST_NUMEL:
        raise ValueError(f"{numel:,} parameters with the tiny sizes")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    inputs, _ = next(_microbatches(0, 0))
    model(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
    model.save_pretrained(folder)


def _microbatches(step: int, rank: int) -> Iterator[Microbatch]:
    """Yield the microbatches of a step on a rank: rank 1 has a third of rank 0's targets."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for _ in range(_ACCUMULATION):
        tokens = torch.randint(1, VOCAB_SIZE, (2, _LENGTH + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        targets[:, _LENGTH // (1 + 2 * rank) :] = IGNORED
        yield inputs, targets


def _num_targets(step: int) -> int:
    batches = [batch for rank in range(_NUM_RANKS) for batch in _microbatches(step, rank)]
    return sum(int((targets != IGNORED).sum()) for _, targets in batches)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: gradients that are zero but for rounding (biases of keys) would become steps of the learning rate.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


def _train(published: Path, checkpoint: Path) -> tuple[list[float], str]:
    """Train on ranks; return the losses of the steps, and the loss function in words."""
    config = resolve({"model": {"name": str(published)}, "parallel": {"device": "cpu", "precision": "fp32"}})
    checked = check_model(config, has_checkpoint=False)
    check_weights(published, checked.outline, checked.spec)

    def on_rank() -> tuple[list[float], str]:
        torch.set_num_threads(1)
        run_model = build(config, published, _CPU)
        run_model.initialise(_CPU)
        model, spec = run_model.module, run_model.spec
        loss_function = choose_loss(model, spec.vocab_size, balance_coefficient(spec), _CPU)
        optimizer = _optimizer(model)
        losses = []
        for step in range(_NUM_STEPS):
            step_loss = torch.zeros(())
            for index, (inputs, targets) in enumerate(_microbatches(step, dist.get_rank())):
                cast(FSDPModule, model).set_requires_gradient_sync(index == _ACCUMULATION - 1)
                loss = loss_function(model, inputs, targets, _num_targets(step) / _NUM_RANKS).cross_entropy
                loss.backward()  # type: ignore[no-untyped-call]
                step_loss += loss.detach() / _NUM_RANKS
            dist.all_reduce(step_loss)
            losses.append(step_loss.item())
            lamella_optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        save(checkpoint, model=model)
        is_model_loss = isinstance(loss_function, ModelLoss)
        return losses, "the model's own loss" if is_model_loss else "a loss over the logits"

    return run_ranks(on_rank, _NUM_RANKS)[0]


def _export(checkpoint: Path, exported: Path, config_folder: Path) -> None:
    """Export as `lamella ckpt convert` does.

    Raises:
        ConfigError: The command refuses; with its line.
    """
    errors = io.StringIO()
    argv = ["ckpt", "convert", str(checkpoint), str(exported), "--to", "hf", "--config", str(config_folder)]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = lamella_main(argv)
    if code:
        raise ConfigError(errors.getvalue().strip())


class _TrainingOutcome(NamedTuple):
    """The outcome of a training: the losses of all steps, and logits of the trained model."""

    losses: list[float]
    logits: torch.Tensor

    def difference(self, other: "_TrainingOutcome") -> float:
        """Return the largest difference of another training's losses and logits, relative to this one's largest."""
        losses = max(abs(a - b) / abs(a) for a, b in zip(self.losses, other.losses, strict=True))
        return max(losses, float((self.logits - other.logits).abs().max() / self.logits.abs().max()))


def _trained_by_transformers(published: Path, noise_seed: int | None = None) -> _TrainingOutcome:
    """Train the unsharded model on the batches of all ranks; with a seed, from weights that differ in the last bit."""
    model: Any = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).train()
    if noise_seed is not None:
        torch.manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randint(-1, 2, parameter.shape))
    optimizer = _optimizer(model)
    losses = []
    for step in range(_NUM_STEPS):
        step_loss = 0.0
        for rank in range(_NUM_RANKS):
            for inputs, targets in _microbatches(step, rank):
                logits = model(input_ids=inputs, use_cache=False).logits.float()
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / _num_targets(step)
                loss.backward()  # type: ignore[no-untyped-call]
                step_loss += loss.item()
        losses.append(step_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with TemporaryDirectory() as folder:  # Opened from files alike: Youtu forgets a row of the embedding then.
        model.save_pretrained(folder)
        return _TrainingOutcome(losses, _logits(_opened(Path(folder))))


def _opened(folder: Path) -> nn.Module:
    """Open a folder in transformers.

    Raises:
        ValueError: transformers misses a tensor in the folder, or finds another.
    """
    load = cast(Any, AutoModelForCausalLM.from_pretrained)
    model, info = load(folder, dtype=torch.float32, output_loading_info=True)
    if unfit := {kind: names for kind, names in info.items() if names}:
        raise ValueError(f"Expected all weights in the folder, got {unfit}.")
    return cast(nn.Module, model)


def _logits(model: nn.Module) -> torch.Tensor:
    inputs, _ = next(_microbatches(_NUM_STEPS, 0))
    with torch.no_grad():
        return cast(torch.Tensor, cast(Any, model.eval()(input_ids=inputs, use_cache=False)).logits)


def _in_short(error: Exception) -> str:
    text = error.rank_traceback.strip().splitlines()[-1] if isinstance(error, RankFailure) else f"{error}"
    return textwrap.shorten(f"{type(error).__name__}: {text}", 160)


def _without(folder: str, text: str) -> str:
    return textwrap.shorten(text.replace(f"{folder}/", ""), 300)


def page(rows: Sequence[TypeRow]) -> str:
    """Return the page of the table."""
    built = [row for row in rows if row.outcome != "not built"]
    counts = {outcome: sum(row.outcome == outcome for row in built) for outcome in ("exact", "refused")}
    counts["neither"] = len(built) - sum(counts.values())
    return _PAGE.format(
        versions=f"transformers {transformers.__version__} and torch {torch.__version__}",
        date=dt.datetime.now(tz=dt.UTC).date(),
        num_types=len(rows),
        num_built=len(built),
        **counts,
        steps=_NUM_STEPS,
        accumulation=_ACCUMULATION,
        tolerance=f"{_TOLERANCE:.0e}",
        lines="\n".join(row.line() for row in built),
        not_built=", ".join(row.model_type for row in rows if row.outcome == "not built"),
    )


_PAGE: Final = """# Model types

Generated by `./dev model_types` with {versions} on {date}; not edited.

Of {num_types} types in transformers' table of causal language models, {num_built} were built with one set of tiny
sizes: {exact} exact, {refused} refused with the reason, {neither} neither.

A tiny model of each type was saved by transformers. Two ranks read their shards from the folder and trained {steps}
steps of {accumulation} microbatches in fp32, with unequal numbers of targets, and the checkpoint was exported.
transformers trained the same model unsharded. The difference is the largest of the losses' and of the exported model's
logits, relative to the largest. *exact* is at most {tolerance}; or, where a rounding decides on a ReLU or an expert,
at most three times the difference between trainings in transformers alone whose weights differ in the last bit.

| type | outcome | difference | loss, or the reason |
|---|---|--:|---|
{lines}

Not built with these sizes, and not tried: {not_built}.
"""


if __name__ == "__main__":
    main()
