"""megatron-core models under fully_shard: a whole model in one call, or the modules to shard as units."""

from lamella_megatron._checkpoint.checkpoint import load_checkpoint as load_checkpoint
from lamella_megatron._checkpoint.checkpoint import save_checkpoint as save_checkpoint
from lamella_megatron._megatron_lm.installation import install as install
from lamella_megatron._model.fused_layers import connect_fused_layers as connect_fused_layers
from lamella_megatron._model.parameter_attributes import mark as mark
from lamella_megatron._model.sharded_model import build_sharded_model as build_sharded_model
from lamella_megatron._model.sharded_model import fully_shard_model as fully_shard_model
from lamella_megatron._model.units import sharding_units as sharding_units
