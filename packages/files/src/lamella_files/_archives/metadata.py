"""DCP's `.metadata`: a checkpoint's tensors and objects, and their places in files.

The file is a pickle, read as data: Note [Nothing runs]. Its contents are validated here, once, so that a
reader may rely on them.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch

from lamella_files._base.boxes import are_sizes
from lamella_files._base.directories import METADATA_FILE
from lamella_files._base.errors import CheckpointDamaged, CheckpointUntrusted
from lamella_files._base.pickles import Inert, UnknownType, read_pickle
from lamella_files._base.small_files import file_size, read_bytes
from lamella_files._sources.source import TensorInfo
from lamella_layout import Chunk

WRITTEN_BY: Final = "lamella_checkpoint"
"""Module name in the metadata of a checkpoint from `save`; `lamella.json` lies beside such metadata."""

T = TypeVar("T")

_END_NBYTES: Final = 4096  # After all names and places, torch pickles the record of the save.
_KNOWN_TYPES: Final = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # megatron-core stores the plans of a save in the metadata.
        *(
            ("torch.distributed.checkpoint.planner", name)
            for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        ("torch.serialization", "_get_layout"),
        # Python before 3.11.4 stores an enum member as a call of getattr; a stand-in's call does nothing.
        ("builtins", "getattr"),
        ("__builtin__", "getattr"),  # its name in old protocols
        # The home of `TensorProperties` in torch 2.0 and 2.1.
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        # `StorageMeta.checkpoint_id` may be a path; Python 3.13 pickles paths from another module.
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
        ),
    }
)


class DcpItem(NamedTuple):
    """One written unit: a chunk of a tensor, or an object. `offset` and `length` are in bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class StoredMetadata:
    """The contents of a `.metadata`.

    Attributes:
        tensors: By name, in the order of the file.
        objects: Names of values that are no tensors.
        items: Places in files: a tensor's chunks by name and offsets, objects by name and None.
        paths: The keys, outermost first, from which torch joined a name.
        save_id: The save's unique identifier, if the writer recorded one.
        modules: The writer's own marks.
        notes: Megatron's data beside each tensor, by name; empty elsewhere.
        compressed: Names whose items went through an extension of DCP's writer.
    """

    tensors: Mapping[str, TensorInfo]
    objects: tuple[str, ...]
    items: Mapping[tuple[str, tuple[int, ...] | None], DcpItem]
    paths: Mapping[str, tuple[str | int, ...]]
    save_id: str | None
    modules: tuple[str, ...]
    notes: Mapping[str, Any]
    compressed: frozenset[str]

    @classmethod
    def read(cls, directory: Path, *, trust: bool = False) -> "StoredMetadata":
        """Read the file of the checkpoint in `directory`.

        Args:
            directory: The directory of the checkpoint.
            trust: Allow unpickling of unknown types. **Unsafe: can execute code.**

        Raises:
            CheckpointDamaged: The file is absent or unreadable, or its contents are inconsistent.
            CheckpointUntrusted: The file holds a type that is not torch's own.
        """
        file = directory / METADATA_FILE
        file_size(directory, METADATA_FILE)
        content = read_bytes(file)
        try:
            return _checked(read_pickle(content, knows=_knows, trust=trust))
        except UnknownType as unknown:
            raise CheckpointUntrusted(str(file), unknown.name) from None
        except Exception as error:  # Unpickling garbage can raise any exception.
            raise CheckpointDamaged(str(file), f"{type(error).__name__}: {error}") from error


def is_of_save(directory: Path, save_id: str) -> bool:
    """Whether the checkpoint in `directory`, if there is one, records this save.

    Effects: reads the end of the file alone: ranks that wait ask twice a second, and the file may have many megabytes.
    """
    try:
        with (directory / METADATA_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_NBYTES))
            return save_id.encode() in file.read()
    except OSError:
        return False


def _knows(module: str, name: str) -> bool:
    megatrons = name == "MCoreMetadata" and module.startswith("megatron.core.dist_checkpointing")
    return megatrons or (module, name) in _KNOWN_TYPES


def _checked(metadata: object) -> StoredMetadata:
    fields = _fields(metadata)
    tensors: dict[str, TensorInfo] = {}
    objects: list[str] = []
    for name, entry in _expect(dict, fields.get("state_dict_metadata"), "state_dict_metadata").items():
        if "chunks" in _fields(entry):
            tensors[_expect(str, name, "name")] = _tensor(name, _fields(entry))
        else:
            objects.append(_expect(str, name, "name"))
    items: dict[tuple[str, tuple[int, ...] | None], DcpItem] = {}
    compressed: set[str] = set()
    for index, info in _expect(dict, fields.get("storage_data"), "storage_data").items():
        at, info_fields = _fields(index), _fields(info)
        name = _expect(str, at.get("fqn"), "fqn")
        offsets = at.get("offset")
        items[name, None if offsets is None else _sizes(name, offsets)] = _item(name, info_fields)
        if info_fields.get("transform_descriptors"):
            compressed.add(name)
    meta = _fields(fields.get("storage_meta"))
    save_id = meta.get("save_id")
    return StoredMetadata(
        tensors=tensors,
        objects=tuple(objects),
        items=items,
        paths=dict(_paths(fields.get("planner_data"))),
        save_id=save_id if isinstance(save_id, str) else None,
        modules=tuple(module for module in meta.get("modules") or () if isinstance(module, str)),
        notes=fields["mcore_data"] if isinstance(fields.get("mcore_data"), dict) else {},
        compressed=frozenset(compressed),
    )


def _fields(value: object) -> Mapping[str, Any]:
    return value.fields if isinstance(value, Inert) else getattr(value, "__dict__", {})


def _tensor(name: str, fields: Mapping[str, Any]) -> TensorInfo:
    shape = _sizes(name, fields.get("size"))
    chunks = []
    for chunk in _expect(list, fields.get("chunks"), f"chunks of {name!r}"):
        chunk_fields = _fields(chunk)
        box = Chunk(_sizes(name, chunk_fields.get("offsets")), _sizes(name, chunk_fields.get("sizes")))
        if not len(box.offsets) == len(box.sizes) == len(shape) or any(
            offset + size > end for offset, size, end in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise ValueError(f"expected chunks of {name!r} inside its shape {shape}, got {box}")
        chunks.append(box)
    return TensorInfo(shape, _dtype(name, fields.get("properties")), tuple(chunks))


def _dtype(name: str, properties: object) -> torch.dtype:
    # A stand-in keeps the state as a tuple; a trusted pickle makes an object with attributes.
    state = properties.state if isinstance(properties, Inert) else getattr(properties, "dtype", None)
    return _expect(torch.dtype, state[0] if isinstance(state, tuple) and state else state, f"dtype of {name!r}")


def _item(name: str, fields: Mapping[str, Any]) -> DcpItem:
    item = DcpItem(
        _expect(str, fields.get("relative_path"), f"file of {name!r}"),
        _expect(int, fields.get("offset"), f"offset of {name!r}"),
        _expect(int, fields.get("length"), f"length of {name!r}"),
    )
    if min(item.offset, item.length) < 0:
        raise ValueError(f"expected a place of {name!r} in its file, got {item}")
    return item


def _sizes(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not are_sizes(value):
        raise ValueError(f"expected sizes or offsets of {name!r}, got {value!r}")
    return tuple(value)


def _paths(planner_data: object) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    for name, path in planner_data.items() if isinstance(planner_data, dict) else ():
        if isinstance(name, str) and isinstance(path, tuple) and all(isinstance(key, str | int) for key in path):
            yield name, path


def _expect(kind: type[T], value: object, field_name: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"expected {field_name} to be of type {kind.__name__}, got {type(value).__name__}")
    return value
