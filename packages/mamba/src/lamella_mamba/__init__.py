"""Mamba models under fully_shard: the modules to shard as units."""

from lamella_mamba._live import bind_live_parameters as bind_live_parameters
from lamella_mamba._units import declare_direct_reads as declare_direct_reads
from lamella_mamba._units import join_tied_blocks as join_tied_blocks
from lamella_mamba._units import sharding_units as sharding_units
