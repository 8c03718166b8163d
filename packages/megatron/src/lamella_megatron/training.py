"""The wrapper and the optimizer that megatron-core's training loop asks for. The module imports megatron-core.

`forward_backward_func`, `finalize_model_grads` and learning-rate schedules of megatron-core run over them unchanged.
"""

from lamella_megatron._muon import keep_matrices as keep_matrices
from lamella_megatron._optimizer import ShardedOptimizer as ShardedOptimizer
from lamella_megatron._optimizer import sharded_optimizer as sharded_optimizer
from lamella_megatron._overlap import forward_backward_overlapped as forward_backward_overlapped
from lamella_megatron._overlap import overlapped_peak_nbytes as overlapped_peak_nbytes
from lamella_megatron._wrapper import ShardedModel as ShardedModel

__all__ = [
    "ShardedModel",
    "ShardedOptimizer",
    "forward_backward_overlapped",
    "keep_matrices",
    "overlapped_peak_nbytes",
    "sharded_optimizer",
]
