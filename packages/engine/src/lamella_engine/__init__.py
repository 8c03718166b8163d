"""Fully sharded training: FSDP2's `fully_shard`, with nothing copied on the way."""

from lamella_engine._fully_shard import fully_shard as fully_shard
from lamella_engine._module import FSDPModule as FSDPModule
from lamella_engine._module import UnshardHandle as UnshardHandle
from lamella_engine._module import register_fsdp_forward_method as register_fsdp_forward_method
from lamella_engine._module import share_comm_ctx as share_comm_ctx
from lamella_engine._placements import DDP as DDP
from lamella_engine._placements import HSDP as HSDP
from lamella_engine._placements import ZERO1 as ZERO1
from lamella_engine._placements import ZERO2 as ZERO2
from lamella_engine._placements import ZERO3 as ZERO3
from lamella_engine._placements import AxisPlacement as AxisPlacement
from lamella_engine._policies import CPUOffloadPolicy as CPUOffloadPolicy
from lamella_engine._policies import DataParallelMeshDims as DataParallelMeshDims
from lamella_engine._policies import OffloadPolicy as OffloadPolicy
from lamella_precision import MixedPrecisionPolicy as MixedPrecisionPolicy
