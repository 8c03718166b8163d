"""megatron-core models under fully_shard: what to shard as one unit."""

from lamella_megatron._units import sharding_units as sharding_units
