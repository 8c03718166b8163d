"""Numbers beside Megatron's tensors: sizes told by `args`, and the progress of training."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lamella_files import Source

OF_ARGS: Final = "args."
"""Before the names of single values, as readers of `torch_dist` give them."""


def args_of(source: Source) -> dict[str, object]:
    """The values of Megatron's `args` in a source, by name; empty without any."""
    if "args" in source.objects:
        arguments = source.read_object("args")
        return dict(arguments if isinstance(arguments, Mapping) else vars(arguments))
    single = [name for name in source.objects if name.startswith(OF_ARGS)]
    return {name.removeprefix(OF_ARGS): source.read_object(name) for name in single}


def sizes_of_args(args: Mapping[str, object]) -> dict[str, int]:
    """The rules' sizes computable from Megatron's `args`, by name."""
    counts = {name: value for name, value in args.items() if isinstance(value, int)}
    if {"hidden_size", "mamba_head_dim"} <= set(counts) and counts["mamba_head_dim"] > 0:
        # Mixers without a number of heads are twice as wide as the model.
        counts.setdefault("mamba_num_heads", 2 * counts["hidden_size"] // counts["mamba_head_dim"])

    def product(*names: str) -> int | None:
        result = 1
        for name in names:
            if name not in counts:
                return None
            result *= counts[name]
        return result

    sizes = {
        "tp": product("tensor_model_parallel_size"),
        "qk": product("linear_num_key_heads", "linear_key_head_dim"),
        "v": product("linear_num_value_heads", "linear_value_head_dim"),
        "nvh": product("linear_num_value_heads"),
        "d_inner": product("mamba_num_heads", "mamba_head_dim"),
        "d_state": product("mamba_num_groups", "mamba_state_dim"),
        "nheads": product("mamba_num_heads"),
        "q_down": product("q_lora_rank"),
    }
    if "kv_lora_rank" in counts and "qk_pos_emb_head_dim" in counts:
        sizes["kv_down"] = counts["kv_lora_rank"] + counts["qk_pos_emb_head_dim"]
    return {name: size for name, size in sizes.items() if size is not None}


_HEADS: Final = {
    ".mixer.in_proj.": ("mamba_num_groups", "mamba_num_heads"),
    ".self_attention.in_proj.": ("linear_num_key_heads", "linear_num_value_heads"),
}
"""Names in `args` of numbers that tensor-parallel ranks share, by a part of the names of layers that have them."""


def check_heads(names: Iterable[str], args: Mapping[str, object], num_ranks: int) -> None:
    """Refuse parts of heads or groups: they would be written, and no model could read them."""
    for layer, options in _HEADS.items():
        for option in options if any(layer in name for name in names) else ():
            number = args.get(option)
            if isinstance(number, int) and number % num_ranks:
                raise ValueError(
                    f"Expected a number of tensor-parallel ranks that divides the checkpoint's `{option}` ({number}), "
                    f"got {num_ranks}."
                )


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The progress of training in a checkpoint of Megatron, and missing counters.

    `found` are plain values by name; `lacking` are names expected by a resumed run.
    """

    found: Mapping[str, object] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()


EXPECTED_OBJECTS: Final = (
    "checkpoint_version",
    "iteration",
    "args",
    "optimizer",
    "opt_param_scheduler",
    "rng_state",
    "num_floating_point_operations_so_far",
)
"""Top-level names in a checkpoint of megatron-core's own training."""


def counters(source: Source, train_state: Mapping[str, object] | None = None) -> Counters:
    """The progress of training, from a checkpoint of Megatron or a conversion by Megatron-Bridge.

    Args:
        source: Canonical or stored names.
        beside: Plain values from files beside the checkpoint. Bridge's counters are in `train_state.pt`, and its
            entries in the checkpoint are placeholders: values beside take precedence.

    Effects: reads the counters, and neither `args` nor random states.
    """
    present = {re.split(r"[./]", name, maxsplit=1)[0] for name in [*source.tensors, *source.objects]}
    arguments: dict[str, object] = {}
    for name in ("checkpoint_version", "iteration", "num_floating_point_operations_so_far"):
        if name in source.objects:
            arguments[name] = source.read_object(name)
    arguments |= {"iteration" if name == "step" else name: value for name, value in (train_state or {}).items()}
    lacking = tuple(name for name in EXPECTED_OBJECTS if name not in present and name not in arguments)
    return Counters(found=arguments, lacking=lacking)
