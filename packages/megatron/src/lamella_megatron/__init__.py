"""megatron-core models under fully_shard: the modules to shard as units."""

from lamella_megatron._units import sharding_units as sharding_units
