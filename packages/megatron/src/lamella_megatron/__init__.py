"""megatron-core models under fully_shard: a whole model in one call, or the modules to shard as units."""

from lamella_megatron._checkpoint import load_checkpoint as load_checkpoint
from lamella_megatron._checkpoint import save_checkpoint as save_checkpoint
from lamella_megatron._fused_layers import connect_fused_layers as connect_fused_layers
from lamella_megatron._marks import mark as mark
from lamella_megatron._model import build_sharded_model as build_sharded_model
from lamella_megatron._model import fully_shard_model as fully_shard_model
from lamella_megatron._units import sharding_units as sharding_units
