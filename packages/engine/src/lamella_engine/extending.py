"""For packages that build on the engine: trees of units and their events, sharded parameters, optimizer hooks.

Training programs need none of the names. The names may change with a minor version of the engine; private modules may
change with any version.

- Units: `unit_of`, which tells the modules of one unit together.
- Events: a subclass of `Listener` hears a `Tree` of `living_trees()` after `Tree.listen`. `finish_deferred` waits for
  reductions whose wait a listener has deferred (`StepEnd.defers_wait`).
- Steps: `replace_step_hook` puts a function in its place around every `torch.optim` step; `step_on_dtensors` is the
  engine's own for the step's arguments.
- Parameters: `is_sharded`, `sharded_originals`, and tensors with a parameter's placements (`shard_like`,
  `dtensor_over`).
- Placements: `placement_on`, the result of a `shard_placement_fn` for a parameter on a mesh of its own; `MeshInfo`, the
  mesh in such a result; `RaggedShard`, the cut rows of the flat layout.
- Norms over all ranks: `groups_that_share`, `all_reduce_anywhere`.
- Streams: `run_on` puts the work of a model's units on the streams of an `Accelerator` in place of torch's;
  `watched_ranges` tells the unit and phase of the engine's work.
- Stand-ins: `Installation` puts classes and functions in the place of a library's, in all modules, until undone.
- Versions: `VendorVersions` holds an installed library against the versions that an adapter was tested with.
- Nests of tensors, as modules take and return: `map_tensors`, `tensors_in`, `hides_tensors`.
"""

from lamella_engine._common.installation import Installation as Installation
from lamella_engine._common.labels import watched_ranges as watched_ranges
from lamella_engine._common.tensors import hides_tensors as hides_tensors
from lamella_engine._common.tensors import map_tensors as map_tensors
from lamella_engine._common.tensors import tensors_in as tensors_in
from lamella_engine._modules.attached import run_on as run_on
from lamella_engine._modules.attached import unit_of as unit_of
from lamella_engine._optimizer_hooks import StepHook as StepHook
from lamella_engine._optimizer_hooks import before_step as before_step
from lamella_engine._optimizer_hooks import forget_measured as forget_measured
from lamella_engine._optimizer_hooks import held_by as held_by
from lamella_engine._optimizer_hooks import is_compiled as is_compiled
from lamella_engine._optimizer_hooks import note_step as note_step
from lamella_engine._optimizer_hooks import refuse_kernels_on_dtensors as refuse_kernels_on_dtensors
from lamella_engine._optimizer_hooks import replace_step_hook as replace_step_hook
from lamella_engine._optimizer_hooks import step_on_dtensors as step_on_dtensors
from lamella_engine._parameters.mesh_placement import ParameterMesh as ParameterMesh
from lamella_engine._parameters.mesh_placement import ParameterPlacement as ParameterPlacement
from lamella_engine._parameters.mesh_placement import placement_on as placement_on
from lamella_engine._parameters.sharded_parameter import ShardedParameter as ShardedParameter
from lamella_engine._parameters.sharded_parameter import is_sharded as is_sharded
from lamella_engine._parameters.sharded_parameter import shard_like as shard_like
from lamella_engine._parameters.sharded_parameter import sharded_originals as sharded_originals
from lamella_engine._parameters.sharding import MeshInfo as MeshInfo
from lamella_engine._parameters.sharding import all_reduce_anywhere as all_reduce_anywhere
from lamella_engine._parameters.sharding import groups_that_share as groups_that_share
from lamella_engine._parameters.sharding import local_of as local_of
from lamella_engine._ragged.dtensor import dtensor_over as dtensor_over
from lamella_engine._streams.streams import Accelerator as Accelerator
from lamella_engine._tree.tree import Listener as Listener
from lamella_engine._tree.tree import Tree as Tree
from lamella_engine._tree.tree import finish_deferred as finish_deferred
from lamella_engine._tree.tree import living_trees as living_trees
from lamella_engine._unit.unit import Unit as Unit
from lamella_layout import RaggedShard as RaggedShard
from lamella_precision import VendorVersions as VendorVersions

__all__ = [
    "Accelerator",
    "Installation",
    "Listener",
    "MeshInfo",
    "ParameterMesh",
    "ParameterPlacement",
    "RaggedShard",
    "ShardedParameter",
    "StepHook",
    "Tree",
    "Unit",
    "VendorVersions",
    "all_reduce_anywhere",
    "before_step",
    "dtensor_over",
    "finish_deferred",
    "forget_measured",
    "groups_that_share",
    "held_by",
    "hides_tensors",
    "is_compiled",
    "is_sharded",
    "living_trees",
    "local_of",
    "map_tensors",
    "note_step",
    "placement_on",
    "refuse_kernels_on_dtensors",
    "replace_step_hook",
    "run_on",
    "shard_like",
    "sharded_originals",
    "step_on_dtensors",
    "tensors_in",
    "unit_of",
    "watched_ranges",
]
