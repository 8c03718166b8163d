"""Megatron's `torch_dist` under canonical names: stacked tensors are separated, main weights become the model's.

Note [Main weights]
    Megatron's optimizers keep the fp32 weights as a slot, beside a model in bf16: `param` in the distributed
    optimizer's format `fully_reshardable`, `fp32_param` in its older format and of other optimizers. Training continues
    from the fp32 weights, so these are read as the model's weights; the bf16 weights would lose precision.

Note [Buckets]
    By default (`dp_reshardable`) the distributed optimizer stores its buckets, flat, under `optimizer.distributed`.
    The places of parameters in a bucket are not stored, but follow from the writers' ranks and options. Buckets are not
    read.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from lamella_convert._translation.hybrid_stack import logical_name
from lamella_convert._translation.megatron import canonical_name, is_of_processes
from lamella_convert._translation.megatron_rules import GATED
from lamella_convert._translation.rules import Rule, Rules, parameter_shapes
from lamella_convert._translation.terms import Stack, Term
from lamella_convert._translation.translate import translate
from lamella_files import OPTIONS, STATE, Correspondence, Renamed, Source, WithObjects, in_model, rename

BUCKETS_WAY_OUT: Final = (
    "The checkpoint has the distributed optimizer's state and main weights in buckets of the ranks that saved, which "
    "are not read: save it by Megatron with --dist-ckpt-optim-fully-reshardable, or load the weights without the "
    "optimizer."
)
"""The way out for a load that lacks the optimizer's state, see Note [Buckets]."""

_MAIN_WEIGHTS: Final = ("fp32_param", "param")
_STEPS: Final = (".step", ".common_step")  # Of a group of parameters, and of all parameters.

# Each optimizer of a chain (one for experts, say) may have a prefix of its own.
_STATE: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)$")
_BUCKETS: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_NUMBERED: Final = re.compile(r"\.layers\.\d+\.")
_NO_PARAMETERS: Final = ("optimizer.",)
_COMMON: Final = "common_state/"


def key_of(name: str) -> tuple[str]:
    """The one key of a stored name."""
    return (name,)


def read_torch_dist(source: Source, common: Mapping[str, object] | None = None) -> Renamed:
    """A `torch_dist` checkpoint under canonical names.

    Layers stacked on a first dim (in models with equal layers) and experts get their numbers. Main
    weights are read as the model's, see Note [Main weights].

    Args:
        source: With the stored names.
        common: Unsharded values, nested: the contents of `common.pt`, or of the object in newer releases. Plain values
            are among the objects, by dotted name; the optimizer's step becomes every parameter's.

    Returns:
        `model.<name>`, `optimizer.state.<name>.<slot>`, and all other entries, except for the state of the writing
        processes and the optimizer's buckets (Note [Buckets]), which are in `left_over`. Slots stored flat by older
        releases (with another shape than the parameter) stay unchanged.

    Effects: reads nothing.
    """
    renamed = rename(source, _reads(_main_weights(source)))
    names: Renamed = translate(renamed, _stacks(parameter_shapes(renamed)), to="left")
    names = translate(names, Rules(GATED).match(parameter_shapes(names), "right"), to="left")
    if common is not None:
        names = rename(WithObjects(names, _objects(common, names)), lambda name: name)
    return names.leaving(name for name in renamed.left_over if is_of_processes(name) or is_of_buckets(name))


def is_of_buckets(name: str) -> bool:
    """Whether a stored name is of the distributed optimizer's buckets: Note [Buckets]."""
    return _BUCKETS.match(name) is not None


def _main_weights(source: Source) -> dict[str, str]:
    """The model weight for each main weight, by name; except for main weights stored flat by older releases."""
    slots = {name: match[2] for name in source.tensors if (match := _STATE.match(name)) and match[1] in _MAIN_WEIGHTS}
    return {
        name: weight
        for name, weight in slots.items()
        if weight not in source.tensors or source.tensors[weight].shape == source.tensors[name].shape
    }


def _reads(main_weights: Mapping[str, str]) -> Callable[[str], str | None]:
    replaced = frozenset(main_weights.values())

    def read(name: str) -> str | None:
        if "._extra_state" in name or name in replaced or name.startswith(_COMMON):
            return None
        if is_of_processes(name) or is_of_buckets(name):
            return None
        if name in main_weights:
            return in_model(_canonical(main_weights[name]))
        if match := _STATE.match(name):
            return f"optimizer.state.{_canonical(match[2])}.{match[1]}"
        return name if name.startswith(_NO_PARAMETERS) else in_model(_canonical(name))

    return read


def _canonical(name: str) -> str:
    return logical_name(canonical_name(name))


def _stacks(shapes: Mapping[str, tuple[int, ...]]) -> list[Correspondence]:
    return Rules(tuple(_unstacked(shapes))).match(shapes, "right")


def _unstacked(names: Iterable[str]) -> Iterable[Rule]:
    """A rule for each tensor with stacked layers, experts or both."""
    for name in names:
        single, indices = name, []
        if ".layers." in name and not _NUMBERED.search(name):
            single, indices = single.replace(".layers.", ".layers.{layer}.", 1), ["layer"]
        if ".experts.experts." in name:
            single, indices = _expert_name(single.replace(".experts.experts.", ".experts.")), [*indices, "expert"]
        term: Term = single
        for index in reversed(indices):
            term = Stack(term, index)
        if indices:
            yield Rule(term, name)


def _expert_name(name: str) -> str:
    """`linear_fc1.weight` as each expert's: `linear_fc1.weight{expert}`."""
    numbered = re.sub(r"\.(weight|bias)(?=$|[._])", r".\1{expert}", name, count=1)
    return numbered if numbered != name else f"{name}{{expert}}"


def _objects(common: Mapping[str, object], names: Source) -> dict[str, object]:
    flat = dict(_flattened(common))
    steps = {value for name, value in flat.items() if name.startswith("optimizer.") and name.endswith(_STEPS)}
    # An optimizer that is no wrapper has its groups where native names have parameters.
    flat = {
        f"optimizer.{name}" if name.startswith(OPTIONS) else name: value
        for name, value in flat.items()
        if not name.endswith(".common_step")
    }
    if len(steps) == 1:
        (step,) = steps
        parameters = parameter_shapes(names)
        entries = (name.removeprefix(STATE).rpartition(".")[0] for name in names.tensors)
        with_state = {entry for entry in entries if entry in parameters}
        flat |= {f"optimizer.state.{name}.step": step for name in sorted(with_state)}
    return {name: value for name, value in flat.items() if name not in {*names.tensors, *names.objects}}


def _flattened(value: object, name: str = "") -> Iterable[tuple[str, object]]:
    """The plain values in nested dicts and lists, by dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flattened(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flattened(inner, f"{name}.{index}")
    elif value is None or isinstance(value, bool | int | float | str | tuple):
        yield name, value
