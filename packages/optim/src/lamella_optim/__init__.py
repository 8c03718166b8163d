"""What an optimizer does with shards: faster steps, steps that hide communication, optimizers built before sharding."""

from lamella_optim._captured import CapturedStep as CapturedStep
from lamella_optim._captured import capture_step as capture_step
from lamella_optim._clipping import clip_grad_norm_ as clip_grad_norm_
from lamella_optim._installation import install as install
from lamella_optim._local_shards import step_on_local_shards as step_on_local_shards
from lamella_optim._muon import MuonAndAdam as MuonAndAdam
from lamella_optim._originals import shard_optimizer as shard_optimizer
from lamella_optim._overlap import OverlapOptimizer as OverlapOptimizer
from lamella_optim._overlap import overlap_optimizer as overlap_optimizer
