"""A described cluster: hosts, wires and rates, from a name, a file, or the calibration of a run."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from lamella._settings.options import ConfigError, nearest, shown
from lamella._settings.parsing import parse_json, parse_toml
from lamella._settings.sizes import nbytes_of
from lamella_buffers import FakeCollective

_GB: Final = 1e9
_US: Final = 1e-6
_SMALLEST: Final = 1e-6
_LARGEST: Final = 1e9
"""The bounds of rates, times and counts: products of several of them are numbers too."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of equal GPUs. Rates are as reached in a step, not peaks.

    Attributes:
        gpus_a_host: GPUs of a host, joined by NVLink.
        gpu_memory: Memory of a GPU, such as "80GiB".
        matmul_tflops: 10^12 operations a second of products in bf16.
        attention_tflops: 10^12 operations a second of attention.
        memory_gb_s: 10^9 bytes a second of elementwise kernels, read and written.
        copy_gb_s: 10^9 bytes a second of copies and casts.
        softmax_gb_s: 10^9 bytes a second of the loss's kernels over the vocabulary.
        optimizer_gb_s: 10^9 bytes a second of the optimizer's kernels.
        gather_gb_s: 10^9 bytes a second sent by a GPU in a gather inside a host.
        reduce_gb_s: 10^9 bytes a second sent by a GPU in a reduction inside a host.
        network_gb_s: 10^9 bytes a second sent by a GPU to other hosts.
        nvlink_us: Microseconds of a collective inside a host before the bytes.
        network_us: Microseconds added by each host of a collective's ring.
        kernel_us: Microseconds of a kernel beside bytes or operations.
        launch_us: Microseconds of the host for an operator with a kernel.
        view_us: Microseconds of the host for a view or an allocation.
        collective_launch_us: Microseconds of the host for a unit's gather or reduction, hooks included.
        slowdown: Time of a kernel beside work on another stream, over the time alone: from 1 on.
    """

    gpus_a_host: int = 8
    gpu_memory: str = "80GiB"
    matmul_tflops: float = 700.0
    attention_tflops: float = 430.0
    memory_gb_s: float = 2400.0
    copy_gb_s: float = 2300.0
    softmax_gb_s: float = 2000.0
    optimizer_gb_s: float = 2500.0
    gather_gb_s: float = 270.0
    reduce_gb_s: float = 270.0
    network_gb_s: float = 40.0
    nvlink_us: float = 20.0
    network_us: float = 8.0
    kernel_us: float = 3.0
    launch_us: float = 10.5
    view_us: float = 3.3
    collective_launch_us: float = 390.0
    slowdown: float = 1.25

    def __post_init__(self) -> None:
        for field in fields(self):
            if (expected := _expected(field.name, getattr(self, field.name))) is not None:
                raise ConfigError(
                    f"Expected {field.name} of the cluster to be {expected}, got {shown(getattr(self, field.name))}."
                )
        nbytes_of(self.gpu_memory, "gpu_memory")

    @property
    def gpu_nbytes(self) -> int:
        """Bytes of a GPU."""
        return nbytes_of(self.gpu_memory, "gpu_memory")

    def collective_seconds(self, collective: FakeCollective) -> float:
        """Return the time of a collective alone.

        Inside a host each GPU sends bytes over NVLink. Between hosts a ring crosses for each of the group's GPUs on the
        host with the fewest, over the GPU's own network card; NVLink and network work at the same time.
        """
        gpus_by_host = Counter(rank // self.gpus_a_host for rank in collective.ranks)
        num_hosts, num_rings = len(gpus_by_host), min(gpus_by_host.values())
        has_nvlink = max(gpus_by_host.values()) > 1
        is_gather = collective.kind == "all_gather"
        nvlink_seconds = collective.sent_nbytes / ((self.gather_gb_s if is_gather else self.reduce_gb_s) * _GB)
        network_seconds = collective.sent_nbytes / (num_rings * self.network_gb_s * _GB)
        latency = self.nvlink_us * has_nvlink + self.network_us * (num_hosts - 1)
        return latency * _US + max(nvlink_seconds if has_nvlink else 0.0, network_seconds if num_hosts > 1 else 0.0)

    def with_rates(self, rates: Mapping[str, float]) -> "Cluster":
        """Return the cluster with other rates and times, by name."""
        return replace(self, **rates)  # type: ignore[arg-type]  # names of float fields

    def to_json(self) -> str:
        """Return the description as text for `--cluster`."""
        return json.dumps(asdict(self), indent=2) + "\n"


def _expected(name: str, setting: object) -> str | None:
    """Return the kind of settings of a name, in words; None for a setting of the kind."""
    if name == "gpu_memory":
        return None if isinstance(setting, str) else 'a text such as "80GiB"'
    is_count = name == "gpus_a_host"
    least = 1 if is_count or name == "slowdown" else 0 if name.endswith("_us") else _SMALLEST
    kind = int if is_count else int | float
    if isinstance(setting, kind) and not isinstance(setting, bool) and least <= setting <= _LARGEST:
        return None
    return f"{'an integer' if is_count else 'a number'} from {least:g} to {_LARGEST:g}"


CLUSTERS: Final[Mapping[str, Cluster]] = {
    "h100": Cluster(),
    "h200": Cluster(
        gpu_memory="141GiB",
        attention_tflops=400.0,
        memory_gb_s=3300.0,
        copy_gb_s=3000.0,
        softmax_gb_s=2800.0,
        optimizer_gb_s=3400.0,
    ),
}
"""Clusters by name: rates fitted to recorded steps on hosts of these GPUs; the network's are an assumption."""


def read_cluster(text: str) -> Cluster:
    """Return the cluster of a name, or of a file in TOML or JSON.

    Args:
        text: "h100", "h200", or a path. A file has any of the attributes of `Cluster`, and may name in `like`
            the cluster to change.

    Raises:
        ConfigError: The text names no cluster and no readable file, or the file has other keys or values.
    """
    if text in CLUSTERS:
        return CLUSTERS[text]
    path = Path(text)
    expected = f"Expected --cluster to be one of {', '.join(CLUSTERS)}, or a file in TOML or JSON, got {text!r}"
    try:
        content = path.read_text(encoding="utf-8")
        settings = parse_toml(content) if path.suffix.lower() == ".toml" else parse_json(content)
    except OSError as error:
        raise ConfigError(f"{expected}: {error.strerror}.{nearest(text, CLUSTERS)}") from error
    except ValueError as error:
        raise ConfigError(f"{expected}: {error}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{expected}, which holds no table.")
    return _changed(settings, text)


def _changed(settings: Mapping[str, Any], text: str) -> Cluster:
    changes = dict(settings)
    name = changes.pop("like", "h100")
    if not isinstance(name, str) or name not in CLUSTERS:
        raise ConfigError(f"Expected `like` in {text!r} to be one of {', '.join(CLUSTERS)}, got {shown(name)}.")
    field_names = {field.name for field in fields(Cluster)}
    for key in changes:
        if key not in field_names:
            raise ConfigError(f"Expected keys of a cluster in {text!r}, got {key!r}.{nearest(key, field_names)}")
    return replace(CLUSTERS[name], **changes)
