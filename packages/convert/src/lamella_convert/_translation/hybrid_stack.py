"""Grouped hybrid stacks: nested layers in modules, and logical layers in checkpoints.

A pattern such as `M[M*]-` has a symbol for each layer; brackets group several layers into one layer of the stack. A
layer's number is written in three ways:

    flat     decoder.layers.2.self_attention             a number for each layer
    nested   decoder.layers.1.layers.1.self_attention    a number for each group, and one in the group
    logical  decoder.layers.1.self_attention             the group's number alone

Note [Groups without logical names]
    Logical names are unambiguous while a group has one layer of a kind. A group with two (`[MM*]`) keeps nested names,
    the others of the stack have logical names.
"""

import re
from collections.abc import Container, Iterable, Mapping
from typing import Final

_NESTED: Final = re.compile(r"^((?:.*\.)?decoder\.layers\.\d+)\.layers\.(\d+)\.(\w+)")
_LOGICAL: Final = re.compile(r"^(?:.*\.)?decoder\.layers\.(\d+)\.((\w+)\..+)$")
_MODULE: Final = re.compile(r"^(?:.*\.)?decoder\.layers\.\d+\.\w+")
_PLACE: Final = re.compile(r"^((?:.*\.)?decoder\.)(layers\.\d+(?:\.layers\.\d+)?)(?=\.)")
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


def regrouped(names: Iterable[str], source: str, target: str) -> dict[str, str]:
    """The names of a stack's parameters in a stack of the same layers in other groups, by name.

    Flat names are those of a pattern without brackets, so `regrouped(names, "*E*E", "[*E][*E]")` nests names, and
    `regrouped(names, "[*E][*E]", "*E*E")` is the inverse. Names outside the stack stay.

    Args:
        names: The names of parameters, flat or nested; not logical.
        source: The pattern of the names.
        target: The pattern of the new names.

    Raises:
        ValueError: A pattern is malformed, the patterns have different layers, or a name is in no layer of `source`.
    """
    if _without_groups(source) != _without_groups(target):
        raise ValueError(
            f"Expected two patterns of the same layers, got {source!r} and {target!r}. Move brackets, and no layers."
        )
    places = dict(zip(_places(source), _places(target), strict=True))
    logical: dict[str, str] = {}
    for name in names:
        match = _PLACE.match(name)
        if match is not None and match[2] not in places:
            raise ValueError(f"Expected the {len(places)} layers of {source!r}, got {name!r}.")
        logical[name] = name if match is None else f"{match[1]}{places[match[2]]}{name[match.end() :]}"
    return logical


def logical_names(names: Iterable[str], pattern: str) -> dict[str, str]:
    """The keys of `torch_dist` for parameters of a stack, by the names in a flat stack.

    Args:
        names: The names of parameters, flat.
        pattern: The pattern of the main stack. Without brackets all names stay, the final norm's too.

    Raises:
        ValueError: The conditions of `regrouped`; or a group has two layers of a kind.
    """
    layers = _without_groups(pattern)
    nested = regrouped(names, layers, pattern)
    if "[" not in pattern:
        return nested
    main_modules = (
        f"decoder.{place}.{_MODULES[symbol][0]}" for place, symbol in zip(_places(pattern), layers, strict=True)
    )
    if groups := nested_groups(main_modules):
        number = int(min(groups).rpartition(".")[2])
        raise ValueError(
            f"Expected groups with one layer of a kind, got {layer_symbols(pattern)[number]!r} in {pattern!r}: keys of "
            "torch_dist have a group's number alone. Save as fsdp_dtensor, or without groups."
        )
    return {name: logical_name(new) for name, new in nested.items()}


def nested_groups(names: Iterable[str]) -> frozenset[str]:
    """The groups (`decoder.layers.1`) with two layers of a kind: Note [Groups without logical names].

    Args:
        names: Parameter names, with all parameters of each group.
    """
    layers: dict[tuple[str, str], str] = {}
    nested = (match.group(1, 2, 3) for match in map(_NESTED.match, names) if match)
    return frozenset(group for group, layer, module in nested if layers.setdefault((group, module), layer) != layer)


def logical_name(name: str, groups: Container[str] = ()) -> str:
    """The logical name of a parameter in a nested stack.

    Args:
        name: The name of a parameter; a name that is not nested stays.
        groups: The groups that stay nested, of `nested_groups`.
    """

    def logical(match: re.Match[str]) -> str:
        return match[0] if match[1] in groups else f"{match[1]}.{match[3]}"

    return _FINAL_NORM.sub(r"\1decoder.final_layernorm.", _NESTED.sub(logical, name))


def nested_modules(names: Iterable[str]) -> dict[str, str]:
    """The nested path of each group's modules (`decoder.layers.1.layers.0.mlp`), by the logical path.

    Args:
        names: The names of parameters, nested or not.
    """
    return {f"{match[1]}.{match[3]}": match[0] for match in map(_NESTED.match, names) if match}


def nested_as(name: str, modules: Mapping[str, str]) -> str:
    """The nested name of a parameter, by its logical name and `nested_modules`; other names stay."""
    match = _MODULE.match(name)
    return name if match is None else f"{modules.get(match[0], match[0])}{name[match.end() :]}"


def with_final_norm(name: str) -> str:
    """The name of a hybrid stack's last norm, by its logical name; other names stay."""
    return re.sub(r"(^|\.)decoder\.final_layernorm\.", r"\1decoder.final_norm.", name)


def nested_names(names: Iterable[str], pattern: str) -> dict[str, str]:
    """Nested names, by logical name, of parameters in a grouped stack; only differing names.

    Args:
        names: The names of parameters; names of `nested_groups` are nested already.
        pattern: The pattern of the main stack; text after a "/" is of further stacks, and pipes only separate parts.

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


def _without_groups(pattern: str) -> str:
    return "".join(symbols.strip("[]") for symbols in layer_symbols(pattern))


def _places(pattern: str) -> list[str]:
    """The path of each layer, flat or nested."""
    return [
        f"layers.{number}.layers.{inner}" if symbols.startswith("[") else f"layers.{number}"
        for number, symbols in enumerate(layer_symbols(pattern))
        for inner in range(len(symbols.strip("[]")))
    ]


def _nested_name(name: str, layers: list[str], pattern: str) -> str:
    if any(layer.startswith("[") for layer in layers) and ".final_layernorm." in name:
        return with_final_norm(name)
    match = _LOGICAL.match(name)
    if match is None or _NESTED.match(name):
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
