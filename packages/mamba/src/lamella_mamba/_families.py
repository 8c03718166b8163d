"""The classes of Mamba models and relatives: a table, by class name.

A model's classes are imported already. By name, the package needs no import of transformers, mamba-ssm or
megatron-core.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """Facts about the modules of one class.

    Attributes:
        class_name: Name of the class, or of a base class.
        is_unit: Whether a module is a sharding unit.
        reads: Children with parameters read by the module without a call of the child, on any path: fused kernels,
            plain torch, generation. A read of the dtype counts, unless for a cache of generation alone.
        is_shared: Whether several modules of the class can hold the same Parameters.
        attributes: Attributes of the module, where two libraries have a class of the same name.
    """

    class_name: str
    is_unit: bool = False
    reads: tuple[str, ...] = ()
    is_shared: bool = False
    attributes: tuple[str, ...] = ()

    def matches(self, module: nn.Module) -> bool:
        """Whether the row is about a module."""
        return any(cls.__name__ == self.class_name for cls in type(module).__mro__) and all(
            hasattr(module, name) for name in self.attributes
        )


_MAMBA1 = ("conv1d", "x_proj", "dt_proj", "out_proj")
_MAMBA2 = ("conv1d", "norm", "out_proj")

TABLE = (
    # transformers
    FamilyRow(class_name="MambaBlock", is_unit=True, reads=("norm",)),
    FamilyRow(class_name="MambaMixer", reads=_MAMBA1, attributes=("dt_proj",)),  # megatron-core's has no such child
    FamilyRow(class_name="MambaForCausalLM", reads=("lm_head",)),
    FamilyRow(class_name="FalconMambaBlock", is_unit=True, reads=("norm",)),
    FamilyRow(class_name="FalconMambaMixer", reads=_MAMBA1),
    FamilyRow(class_name="FalconMambaForCausalLM", reads=("lm_head",)),
    FamilyRow(class_name="Mamba2Block", is_unit=True, reads=("norm",)),
    FamilyRow(class_name="Mamba2Mixer", reads=_MAMBA2),
    FamilyRow(class_name="Mamba2ForCausalLM", reads=("lm_head",)),
    FamilyRow(class_name="NemotronHBlock", is_unit=True, reads=("norm",)),
    FamilyRow(class_name="NemotronHMamba2Mixer", reads=_MAMBA2),
    FamilyRow(class_name="BambaDecoderLayer", is_unit=True),
    FamilyRow(class_name="BambaMixer", reads=_MAMBA2),
    FamilyRow(class_name="JambaAttentionDecoderLayer", is_unit=True),
    FamilyRow(class_name="JambaMambaDecoderLayer", is_unit=True),
    FamilyRow(class_name="JambaMambaMixer", reads=("conv1d", "dt_proj")),
    FamilyRow(class_name="ZambaAttentionDecoderLayer", is_unit=True, is_shared=True),
    FamilyRow(class_name="ZambaHybridLayer", is_unit=True),
    FamilyRow(class_name="ZambaMambaDecoderLayer", is_unit=True),
    FamilyRow(class_name="ZambaMambaMixer", reads=("conv1d",)),
    FamilyRow(class_name="Zamba2AttentionDecoderLayer", is_unit=True, is_shared=True),
    FamilyRow(class_name="Zamba2HybridLayer", is_unit=True),
    FamilyRow(class_name="Zamba2MambaDecoderLayer", is_unit=True),
    FamilyRow(class_name="Zamba2MambaMixer", reads=_MAMBA2),
    FamilyRow(class_name="FalconH1DecoderLayer", is_unit=True),
    FamilyRow(class_name="FalconH1Mixer", reads=_MAMBA2),
    FamilyRow(class_name="GraniteMoeHybridDecoderLayer", is_unit=True),
    FamilyRow(class_name="GraniteMoeHybridMambaLayer", reads=_MAMBA2),
    FamilyRow(class_name="Qwen3NextDecoderLayer", is_unit=True),
    FamilyRow(class_name="Qwen3NextGatedDeltaNet", reads=("conv1d",)),
    # mamba-ssm
    FamilyRow(class_name="Block", is_unit=True, reads=("norm", "norm2"), attributes=("fused_add_norm",)),
    FamilyRow(class_name="Mamba", reads=("in_proj", *_MAMBA1), attributes=("use_fast_path",)),
    FamilyRow(class_name="Mamba2", reads=_MAMBA2, attributes=("use_mem_eff_path",)),
    FamilyRow(class_name="Mamba2Simple", reads=_MAMBA2),
    FamilyRow(class_name="Mamba3"),
    FamilyRow(class_name="MHA", reads=("conv1d",), attributes=("d_conv",)),
    FamilyRow(class_name="MixerModel", reads=("norm_f",), attributes=("fused_add_norm",)),
    # megatron-core, for units smaller than its layers
    FamilyRow(class_name="GatedDeltaNet", reads=("conv1d",), attributes=("conv1d",)),
)
