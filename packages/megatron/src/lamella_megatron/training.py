"""The wrapper and the optimizer that megatron-core's training loop asks for. The module imports megatron-core.

`forward_backward_func`, `finalize_model_grads` and learning-rate schedules of megatron-core run over them unchanged.
"""

from lamella_megatron._driver.muon import keep_matrices as keep_matrices
from lamella_megatron._driver.optimizer import ShardedOptimizer as ShardedOptimizer
from lamella_megatron._driver.optimizer import sharded_optimizer as sharded_optimizer
from lamella_megatron._driver.wrapper import ShardedModel as ShardedModel
from lamella_megatron._overlap.schedule_plan import forward_backward_overlapped as forward_backward_overlapped
from lamella_megatron._overlap.schedule_plan import overlapped_peak_nbytes as overlapped_peak_nbytes

__all__ = [
    "ShardedModel",
    "ShardedOptimizer",
    "forward_backward_overlapped",
    "keep_matrices",
    "overlapped_peak_nbytes",
    "sharded_optimizer",
]
