"""The card of an exported model, or of adapters: the figures of the run, and the lines to open the export."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from lamella._export.trained_run import TrainedRun
from lamella._model.lora import lora_settings
from lamella._record.metrics import StepRecord, last_validations, read

_FINGERPRINT_LENGTH: Final = 16


def model_card(run: TrainedRun, *, model_type: str, dtype: str, version: str) -> str:
    """Return a model card in Markdown, with the metadata block of model hubs.

    Args:
        run: The run, with the exported checkpoint.
        model_type: The model type of transformers.
        dtype: The name of the exported weights' dtype.
        version: The version of lamella.

    Raises:
        CheckpointDamaged: The checkpoint's metadata cannot be read.
    """
    rows = _rows(_figures(run, dtype, version))
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- lamella
- {model_type}
---

# {run.name}

A causal language model ({model_type}), trained {_origin(run)} by `lamella train`.

| figure | |
|---|---|
{rows}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # of this card
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```
"""


def adapter_card(run: TrainedRun, *, model_type: str, dtype: str, version: str) -> str:
    """Return the card of a folder of adapters, with the name of the adapted model; arguments as `model_card`.

    Raises:
        CheckpointDamaged: The checkpoint's metadata cannot be read.
    """
    settings = lora_settings(run.config.model)
    assert settings is not None
    kind, base = "DoRA" if settings.dora else "LoRA", _base(run)
    adapters = {"rank": f"{settings.rank}", "alpha": f"{settings.alpha:g}", "layers": ", ".join(settings.targets)}
    rows = _rows([*((name, f"`{text}`") for name, text in adapters.items()), *_figures(run, dtype, version)])
    return f"""---
base_model: {json.dumps(base)}
library_name: peft
pipeline_tag: text-generation
tags:
- lamella
- lora
- {model_type}
---

# {run.name}

{kind} adapters for `{base}` ({model_type}), trained by `lamella train` with the model frozen.

| figure | |
|---|---|
{rows}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({json.dumps(base)}, dtype="auto")  # the folder of the model, or its name
model = PeftModel.from_pretrained(base, ".")  # the folder of this card
```
"""


def _rows(figures: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"| {name} | {text} |" for name, text in figures)


def _base(run: TrainedRun) -> str:
    """Return the name of a pretrained folder, without its place on a machine."""
    return run.config.model.name.rstrip("/").rpartition("/")[2]


def _origin(run: TrainedRun) -> str:
    """Describe the start of the run."""
    if not run.directory.weights.is_file():
        return "from fresh weights"
    return f"from the weights of `{_base(run)}`"


def _figures(run: TrainedRun, dtype: str, version: str) -> Iterator[tuple[str, str]]:
    extra = run.extra()
    yield "steps", f"{run.step:,}"
    yield "tokens", _tokens(run.step, extra)
    yield from _losses(run)
    yield "fingerprint of the text", f"`{str(extra.get('fingerprint'))[:_FINGERPRINT_LENGTH]}`"
    yield "weights", f"{dtype}, trained in float32"
    yield "lamella", version


def _tokens(step: int, extra: Mapping[str, object]) -> str:
    """Describe the tokens of all steps, counted as for the run's speed: without padding, where the text is known."""
    sequences, length = _number(extra, "optim.batch_size"), _number(extra, "data.sequence_length")
    most = sequences * length
    tokens_a_step = most if extra.get("data.packing") == "stream" else _number(extra, "tokens_a_step")
    if tokens_a_step == most:
        return f"{step * most:,} ({sequences:,} sequences of {length:,} a step)"
    of_step = f"({sequences:,} sequences of up to {length:,} a step)"
    if tokens_a_step:
        return f"{step * tokens_a_step:,} without padding {of_step}"
    return f"at most {step * most:,}, with padding {of_step}"


def _number(extra: Mapping[str, object], name: str) -> int:
    number = extra.get(name)
    return number if isinstance(number, int) else 0


def _losses(run: TrainedRun) -> Iterator[tuple[str, str]]:
    """Yield the last losses up to the exported step; none of a run whose records are gone."""
    records = [record for record in read(run.directory.metrics) if record.step <= run.step]
    if losses := [record for record in records if isinstance(record, StepRecord)]:
        yield "training loss", f"{losses[-1].loss:.4f} nats/token (step {losses[-1].step:,})"
    for last in last_validations(records):
        suffix = "" if last.name is None else f" on {last.name}"
        yield f"validation loss{suffix}", f"{last.nats:.4f} nats/{last.unit} (step {last.step:,})"
