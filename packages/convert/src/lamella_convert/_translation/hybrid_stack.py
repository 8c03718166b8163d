"""Grouped hybrid stacks: nested layers in modules, and logical layers in checkpoints.

A pattern such as `M[M*]-` has a symbol for each layer; brackets group several layers into one layer of the stack. The
group's layers are `decoder.layers.1.layers.0` and so on; logical names omit the inner number, which is
unambiguous while a group has one layer of a kind.
"""

import re
from collections.abc import Iterable
from typing import Final

_NESTED: Final = re.compile(r"^((?:.*\.)?decoder\.layers\.\d+)\.layers\.\d+\.")
_LOGICAL: Final = re.compile(r"^(?:.*\.)?decoder\.layers\.(\d+)\.((\w+)\..+)$")
_FLAT: Final = re.compile(r"^((?:.*\.)?decoder\.layers\.)(\d+)(?=\.)")
_FINAL_NORM: Final = re.compile(r"(^|\.)decoder\.final_norm\.")

_MODULES: Final = {
    "M": ("mixer", "norm"),
    "G": ("self_attention", "input_layernorm"),
    "D": ("self_attention", "input_layernorm", "pre_mlp_layernorm"),
    "*": ("self_attention", "input_layernorm"),
    "+": ("self_attention", "input_layernorm"),
    "-": ("mlp", "pre_mlp_layernorm"),
    "E": ("mlp", "pre_mlp_layernorm"),
}
"""The parameters' first names in a layer, by its symbol in a pattern."""


def logical_name(name: str) -> str:
    """A nested layer's parameter under its logical name; any other name unchanged."""
    return _FINAL_NORM.sub(r"\1decoder.final_layernorm.", _NESTED.sub(r"\1.", name))


def logical_names(names: Iterable[str], pattern: str) -> dict[str, str]:
    """Logical names, by name, of parameters in a flat stack: each layer has a number of its own.

    Args:
        names: Of parameters.
        pattern: Of the main stack, with the groups that the checkpoint is to have.

    Raises:
        ValueError: The pattern is malformed, differs from the names, or has a group with two layers of a kind.
    """
    layers = layer_symbols(pattern)
    group_of = [number for number, symbols in enumerate(layers) for _ in symbols.strip("[]")]
    found: dict[str, str] = {}
    origins: dict[str, str] = {}
    for name in names:
        match = _FLAT.match(name)
        if match is None:
            found[name] = logical_name(name) if len(group_of) > len(layers) else name
            continue
        if int(match[2]) >= len(group_of):
            raise ValueError(f"Expected the {len(group_of)} layers of {pattern!r}, got {name!r}.")
        new = f"{match[1]}{group_of[int(match[2])]}{name[match.end() :]}"
        if (other := origins.setdefault(new, name)) != name:
            raise ValueError(
                f"Expected groups with one layer of a kind, got {other!r} and {name!r} in one group of {pattern!r}, "
                f"both named {new!r} there. Save without groups."
            )
        found[name] = new
    return found


def nested_names(names: Iterable[str], pattern: str) -> dict[str, str]:
    """Nested names, by logical name, of parameters in a grouped stack; only differing names.

    Args:
        names: Of parameters.
        pattern: Of the main stack; text after a "/" is of further stacks, and pipes only separate parts.

    Raises:
        ValueError: The pattern is malformed, differs from the names, or has a group with two layers of a kind.
    """
    layers = layer_symbols(pattern)
    return {name: nested for name in names if (nested := _nested_name(name, layers, pattern)) != name}


def layer_symbols(pattern: str) -> list[str]:
    """The symbols of each logical layer: one symbol for a single layer, symbols in brackets for a group.

    Raises:
        ValueError: Brackets are nested, empty or unclosed, or a symbol is unknown.
    """
    main = pattern.split("/")[0].replace("|", "")
    layers = re.findall(r"\[[^\[\]]+\]|[^\[\]]", main)
    if "".join(layers) != main or set(main) - {*_MODULES, "[", "]"}:
        raise ValueError(
            f"Expected a pattern of {''.join(_MODULES)!r}, groups in brackets and none in another, got {pattern!r}."
        )
    return layers


def _nested_name(name: str, layers: list[str], pattern: str) -> str:
    if any(layer.startswith("[") for layer in layers) and ".final_layernorm." in name:
        return re.sub(r"(^|\.)decoder\.final_layernorm\.", r"\1decoder.final_norm.", name)
    match = _LOGICAL.match(name)
    if match is None:
        return name
    if int(match[1]) >= len(layers):
        raise ValueError(f"Expected the {len(layers)} layers of {pattern!r}, got {name!r}.")
    layer = layers[int(match[1])]
    if not layer.startswith("["):
        return name
    inner = [index for index, symbol in enumerate(layer[1:-1]) if match[3] in _MODULES[symbol]]
    if len(inner) != 1:
        raise ValueError(f"Expected one layer of {layer!r} to have {match[3]!r}, got {len(inner)}, for {name!r}.")
    return f"{name[: match.start(2)]}layers.{inner[0]}.{match[2]}"
