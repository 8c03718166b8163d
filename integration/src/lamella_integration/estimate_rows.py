"""The rows of `bench_estimate`: models, options, and the estimate of a row."""

import json
import random
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_LLAMA: Final = {
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA,
    "qwen3": {
        **_LLAMA,
        "model_type": "qwen3",
        "vocab_size": 151936,
        "intermediate_size": 6144,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "state_size": 64,
        "num_heads": 32,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 64,
    },
}
_TINY: Final = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "num_heads": 8,
    "vocab_size": 1024,
}
SMALLEST_VOCABULARY: Final = 32768

_SHORT: Final = "--batch-size 8 --sequence-length 2048"
_FIXED: Final = (
    "decoder 1b --tokens 4096",
    "llama {short}",
    "qwen3 {short}",
    "llama {short} --stage 2",
    "decoder 5b --tokens 4096",
    "llama {short} --recompute selective",
    "llama {short} --recompute full",
    "decoder 1b --tokens 4096 --stage 1",
    "decoder 1b --tokens 4096 --stage 2",
    "decoder 1b --tokens 8192 --recompute",
    "llama {short} --stage 1",
    "llama {short} --float8 tensor",
    "llama {short} --no-reshard-after-forward",
    "llama {short} --keep-budget 512MiB",
    "llama --batch-size 16 --accumulation 4 --sequence-length 2048",
    "qwen3 {short} --stage 2 --recompute selective",
    "qwen3 {short} --recompute full",
    "qwen3 {short} --stage 1",
    "decoder 5b --tokens 4096 --recompute",
    "decoder 5b --tokens 2048 --stage 2",
    "decoder 5b --tokens 1024 --keep 4GiB",
    "decoder 1b --tokens 2048 --microbatches 3",
    "llama {short} --recompute selective --float8 row",
    "llama {short} --offload-activations",
    "llama {short} --replicate 2",
    "llama {short} --optimizer muon --lr 1e-3",
    "llama {short} --reduce bf16",
    "llama {short} --rest cpu --recompute selective",
    "llama {short} --train model.layers.1*",
    "mamba2 --batch-size 2 --sequence-length 1024",
    "mamba2 --batch-size 4 --sequence-length 1024 --recompute full",
    "qwen3_moe {short}",
    "qwen3_moe {short} --stage 2",
    "qwen3_moe {short} --recompute full",
    "llama {short} --lora-rank 16",
    "qwen3 {short} --lora-rank 16 --recompute full",
    "llama {short} --kernels liger",
    "decoder 1b --tokens 4096 --compile",
    "llama {short} --compile",
    "qwen3 {short} --compile --stage 2",
)


def fixed_rows() -> list[str]:
    """Return the names of the rows that are not drawn: the last ones need packages or time."""
    return [row.format(short=_SHORT) for row in _FIXED]


def drawn_rows(seed: int, count: int) -> list[str]:
    """Return the names of rows drawn by a seed, each of another setting."""
    draw = random.Random(seed)
    rows: list[str] = []
    while len(rows) < count:
        row = _decoder_row(draw) if draw.random() < 0.3 else _recipe_row(draw)
        if row not in rows:
            rows.append(row)
    return rows


def _decoder_row(draw: random.Random) -> str:
    row = f"decoder 1b --layers {draw.randint(6, 24)} --tokens {draw.choice([1024, 2048, 3072, 4096, 6144, 8192])}"
    row += f" --stage {draw.choice([1, 2, 3, 3])}" + draw.choice(["", " --recompute"])
    return row + draw.choice(["", "", f" --microbatches {draw.randint(2, 3)}"])


def _recipe_row(draw: random.Random) -> str:
    accumulation = draw.choice([1, 1, 1, 2])
    row = f"{draw.choice(['llama', 'qwen3'])} --batch-size {2 * accumulation * draw.randint(1, 5)}"
    row += f" --accumulation {accumulation}" if accumulation > 1 else ""
    row += f" --sequence-length {draw.choice([512, 1024, 1536, 2048, 3072])} --stage {draw.choice([1, 2, 3, 3])}"
    row += draw.choice(["", " --recompute selective", " --recompute full"])
    return row + draw.choice(["", "", "", " --float8 tensor", " --reduce bf16", " --optimizer muon --lr 1e-3"])


def model_folder(folder: Path, model: str, *, is_tiny: bool) -> Path:
    """Return the folder with the config of a model; made at the first call. Effects: may write it."""
    values = dict(MODELS[model])
    if is_tiny:
        values |= {name: value for name, value in _TINY.items() if name in values}
    root = folder / model
    if not (root / "config.json").exists():
        root.mkdir(exist_ok=True)
        (root / "config.json").write_text(json.dumps(values))
    return root


def recipe_config(row: str, folder: Path, num_ranks: int, device: str, *, is_tiny: bool) -> Any:
    """Return the settings of `lamella train` of a row: bf16, warnings of short runs aside.

    Effects: may write the folder of the model.
    """
    from lamella.testing import config_of, parse, placed

    model, *options = shlex.split(row)
    root = model_folder(folder, model, is_tiny=is_tiny)
    arguments = ["train", "--model", str(root), "--ranks", str(num_ranks), "--device", device, "--precision", "bf16"]
    if "--lr" not in options:
        arguments += ["--lr", "1e-4"]
    return placed(config_of(parse([*arguments, *options])))


def estimated(row: str, folder: Path, num_ranks: int, device: str, *, is_tiny: bool) -> dict[str, Any]:
    """Return the estimate of a row as plain values, the largest of the first and the last rank.

    Raises: what the estimate raises.
    """
    import torch

    import lamella
    from lamella_integration.estimate_decoder import estimate_decoder

    torch.set_num_threads(1)
    estimates = []
    for rank in sorted({0, num_ranks - 1}):
        if row.startswith("decoder "):
            estimate = estimate_decoder(row, num_ranks, rank, device, is_tiny=is_tiny)
        else:
            estimate = lamella.estimate(recipe_config(row, folder, num_ranks, device, is_tiny=is_tiny), rank=rank)
        estimates.append(estimate)
    # The measured steps have no validation.
    peaks = [max(_step_moments(estimate), key=lambda moment: moment.nbytes) for estimate in estimates]
    peak, largest = max(zip(peaks, estimates, strict=True), key=lambda pair: pair[0].nbytes)
    return {
        "at_rest": dict(largest.at_rest),
        "allocated_nbytes": peak.nbytes + largest.rounding_nbytes,
        "rounding_nbytes": largest.rounding_nbytes,
        "peak_moment": peak.name,
        "peak_kinds": dict(peak.kinds),
        "moments": _by_name((moment.name, moment.nbytes) for moment in largest.moments),
        "notes": [*largest.notes],
    }


def _step_moments(estimate: Any) -> list[Any]:
    return [moment for moment in estimate.moments if moment.name != "validation"]


def _by_name(pairs: Any) -> dict[str, int]:
    """Return the most bytes of each name: microbatches repeat the names of moments."""
    most: dict[str, int] = {}
    for name, nbytes in pairs:
        most[name] = max(nbytes, most.get(name, 0))
    return most
