"""Mamba models under fully_shard: the modules to shard as units, and how tensor-parallel ranks share parameters."""

from lamella_mamba._fp32 import keep_fp32 as keep_fp32
from lamella_mamba._live import bind_live_parameters as bind_live_parameters
from lamella_mamba._splits import Split as Split
from lamella_mamba._splits import merge as merge
from lamella_mamba._splits import split as split
from lamella_mamba._tensor_parallel import annotate as annotate
from lamella_mamba._units import declare_direct_reads as declare_direct_reads
from lamella_mamba._units import join_tied_blocks as join_tied_blocks
from lamella_mamba._units import sharding_units as sharding_units
