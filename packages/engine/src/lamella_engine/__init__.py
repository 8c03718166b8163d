"""Fully sharded training: FSDP2's `fully_shard`, with nothing copied on the way."""

from lamella_engine._diagnostics import NonFinite as NonFinite
from lamella_engine._diagnostics import Spike as Spike
from lamella_engine._diagnostics import SpikeWatch as SpikeWatch
from lamella_engine._diagnostics import find_nonfinite as find_nonfinite
from lamella_engine._diagnostics import parameter_norms as parameter_norms
from lamella_engine._fully_shard import OffloadPolicy as OffloadPolicy
from lamella_engine._fully_shard import fully_shard as fully_shard
from lamella_engine._module import FSDPModule as FSDPModule
from lamella_engine._module import UnshardHandle as UnshardHandle
from lamella_engine._plan import PlannedParameter as PlannedParameter
from lamella_engine._plan import PlannedUnit as PlannedUnit
from lamella_engine._plan import ShardingPlan as ShardingPlan
from lamella_engine._report import describe as describe
from lamella_engine._units import fully_shard_model as fully_shard_model
from lamella_engine._units import plan_units as plan_units
from lamella_precision import MixedPrecisionPolicy as MixedPrecisionPolicy
