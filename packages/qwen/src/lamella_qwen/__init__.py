"""Qwen3.5 under fully_shard: what to shard as one unit, and a tiny model of the family."""

from lamella_qwen._configs import NAMED_CONFIGS as NAMED_CONFIGS
from lamella_qwen._units import declare_direct_reads as declare_direct_reads
from lamella_qwen._units import sharding_units as sharding_units
