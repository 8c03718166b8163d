"""What lamella finds by a config's `model_type`: the family's rules, and how its files differ from its modules."""

from collections.abc import Iterable, Mapping
from typing import Final

from lamella_checkpoint import Family, Join, Rule, Rules, Stack
from lamella_qwen._megatron import megatron_rules, megatron_sizes
from lamella_qwen._sizes import QwenSizes

_WITH_VISION: Final = "model.language_model."
_ALONE: Final = "model."


def module_rules(config: Mapping[str, object]) -> Rules:
    """What corresponds between the names in files (left) and those of transformers' modules (right), where they differ.

    Experts that files store one by one, as `save_pretrained` writes them, are stacked in the modules. A text model is
    found in the files of one with vision, whose other tensors no rule takes.

    Raises:
        ValueError: The config is not a whole Qwen3.5's.
    """
    if QwenSizes.of(config).num_vision_heads is not None:
        return Rules(tuple(_stacks(_WITH_VISION, _WITH_VISION)))
    rest = Rule(f"{_WITH_VISION}{{name*}}", f"{_ALONE}{{name*}}")
    return Rules((*_stacks(_ALONE, _ALONE), *_stacks(_WITH_VISION, _ALONE), rest))


def _stacks(left: str, right: str) -> Iterable[Rule]:
    single, packed = f"{left}layers.{{layer}}.mlp.experts.{{expert}}.", f"{right}layers.{{layer}}.mlp.experts."
    halves = tuple(Stack(f"{single}{half}_proj.weight", index="expert") for half in ("gate", "up"))
    return [
        Rule(Join(halves, sizes=(1, 1), dim=1), f"{packed}gate_up_proj"),
        Rule(Stack(f"{single}down_proj.weight", index="expert"), f"{packed}down_proj"),
    ]


FAMILY: Final = Family(megatron=megatron_rules, megatron_sizes=megatron_sizes, modules=module_rules)
"""What the entry points of this package give."""
