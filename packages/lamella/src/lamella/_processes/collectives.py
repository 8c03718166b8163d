"""The collectives of this process, by torch's counts and flight recorders."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

# Torch's recorders, for gloo and for NCCL. Builds of torch without a recorder lack the function.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def num_collectives(group: "dist.ProcessGroup") -> int:
    """Return the number of collectives of this rank in a group, over all backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    unique = {id(backend): backend for backend in backends}  # A backend may serve several devices.
    return sum(backend._get_sequence_number_for_group() for backend in unique.values())  # type: ignore[attr-defined]


def last_collective() -> str:
    """Return the kind of this process's last collective, for example "all-gather"; "" if unknown.

    Effects: torch copies the records of the last 2,000 collectives: a fraction of a second.
    """
    from torch._C import _distributed_c10d

    dumps = (getattr(_distributed_c10d, name, None) for name in _RECORDERS)
    records = [record for dump in dumps if dump is not None for record in _records(dump(True, False))]
    newest = max(records, key=lambda record: record["time_created_ns"], default=None)
    return "" if newest is None else _kind(newest["profiling_name"])


def _records(dump: str | bytes) -> list[dict[str, Any]]:
    records = json.loads(dump).get("entries", []) if dump else []
    return [record for record in records if "profiling_name" in record and "time_created_ns" in record]


def _kind(name: object) -> str:
    """Return "all-gather" for names like "gloo:all_gather" and "nccl:_all_gather_base"."""
    return f"{name}".rpartition(":")[2].strip("_").removesuffix("_base").replace("_", "-").lower()
