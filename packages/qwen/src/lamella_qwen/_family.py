"""What lamella finds by a config's `model_type`: the family's rules, and how its files differ from its modules."""

from typing import Final

from lamella_checkpoint import Family, Join, Rule, Rules, Stack
from lamella_qwen._megatron import megatron_rules, megatron_sizes


def _of_text_model(left: str, right: str) -> tuple[Rule, ...]:
    """Experts that the files store one by one are stacked in the modules."""
    single, packed = f"{left}layers.{{layer}}.mlp.experts.{{expert}}.", f"{right}layers.{{layer}}.mlp.experts."
    halves = tuple(Stack(f"{single}{half}_proj.weight", index="expert") for half in ("gate", "up"))
    return (
        Rule(Join(halves, sizes=(1, 1), dim=1), f"{packed}gate_up_proj"),
        Rule(Stack(f"{single}down_proj.weight", index="expert"), f"{packed}down_proj"),
    )


MODULES: Final = Rules(
    (*_of_text_model("model.", "model."), *_of_text_model("model.language_model.", "model.language_model."))
)
"""The modules of the model that a config describes."""

TEXT_MODULES: Final = Rules(
    (
        *_of_text_model("model.", "model."),
        *_of_text_model("model.language_model.", "model."),
        Rule("model.language_model.{name*}", "model.{name*}"),
    )
)
"""The modules of the text model alone, which transformers loads from files of a model with vision too."""

FAMILY: Final = Family(
    megatron=megatron_rules, megatron_sizes=megatron_sizes, modules=MODULES, text_modules=TEXT_MODULES
)
"""What the entry points of this package give."""
