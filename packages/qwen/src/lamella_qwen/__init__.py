"""Qwen3.5 under fully_shard and in checkpoints: what to shard as one unit, and where Megatron keeps each tensor."""

from lamella_qwen._configs import NAMED_CONFIGS as NAMED_CONFIGS
from lamella_qwen._family import FAMILY as FAMILY
from lamella_qwen._family import module_rules as module_rules
from lamella_qwen._megatron import megatron_rules as megatron_rules
from lamella_qwen._megatron import megatron_sizes as megatron_sizes
from lamella_qwen._units import declare_direct_reads as declare_direct_reads
from lamella_qwen._units import sharding_units as sharding_units
