"""One file of `torch.save`, a dict of dicts with tensors, as a source.

The pickle is read as data (Note [Nothing runs]), so the tensors of a file are readable whatever the other contents.
A value neither tensor nor plain data is read by torch on request, with tensors mapped from the disk.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from lamella_convert._formats.rank_parts import MEGATRON_WAY_OUT, RankPart, held_whole, is_rank_part, megatron_sizes
from lamella_files import (
    CheckpointDamaged,
    CheckpointUntrusted,
    Copy,
    DcpItem,
    Expected,
    FormatUnknown,
    Inert,
    ItemRead,
    Record,
    StoredTensor,
    TensorInfo,
    TensorRecord,
    Wanted,
    check_places,
    is_little_endian,
    read_pickle,
    read_record,
    read_tensors,
    records,
    storage_records,
    stored_tensor,
    unreadable,
    unsafe_types,
    whole_box,
)

Keys: TypeAlias = tuple[str | int, ...]


class TorchFile:
    """A `Source` over a file of `torch.save`. A name is the keys on the path to a value, joined by dots.

    `paths` has the keys themselves.
    """

    def __init__(self, path: Path, *, trust: bool = False, verify: bool = True) -> None:
        """Read the file's structure, and none of its tensors.

        Files from before torch 1.6 are no archives: torch reads them whole.

        Args:
            path: The file.
            trust: Allow unpickling of types beyond tensors and plain data. **Unsafe: can execute code.**
            verify: Verify the archive's checksums while reading.

        Raises:
            CheckpointDamaged: The file is absent or unreadable.
            CheckpointUntrusted: The file holds an object of another type, such as a module, instead of a dict.
            FormatUnknown: The file holds no dict: one tensor without a name, say.
            RankPart: The file holds one rank's parts of tensors, or of Megatron's model.
        """
        self.path = path
        self._trust = trust
        self._verify = verify
        self._stored_tensors: dict[str, StoredTensor | torch.Tensor] = {}
        self._values: dict[str, object] = {}
        self.paths: dict[str, Keys] = {}
        self._verified: set[Record] = set()
        root, self._files = self._open()
        try:
            self._root = self._dict_of(root)
            for keys, value in _leaves(self._root, self._files):
                self._add(keys, value)
            opaque = {name: value for name, value in self._stored_tensors.items() if isinstance(value, torch.Tensor)}
            parts = [name for name, value in (self._values | opaque).items() if is_rank_part(value)]
            sizes = megatron_sizes(self._root)
        except CheckpointDamaged:
            raise
        except Exception as error:  # Malformed values can raise any exception.
            raise unreadable(self.path, error) from error
        if parts:
            raise RankPart(str(path), parts)
        if sizes and (parts := [name for name in self._stored_tensors if name.startswith("model")]):
            raise RankPart(str(path), parts, f"Megatron's args have {sizes}. {MEGATRON_WAY_OUT}")

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype, (whole_box(tensor.shape),))
            for name, tensor in self._stored_tensors.items()
        }

    @property
    def objects(self) -> Sequence[str]:
        return tuple(self._values)

    def place(self, name: str) -> object:
        """The identity of a tensor in the file: bytes, shape, strides and bits, shared by tied tensors."""
        tensor = self._stored_tensors[name]
        if isinstance(tensor, StoredTensor):
            return tensor
        bits = tensor.is_conj(), tensor.is_neg()
        address = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        return *address, tensor.shape, tensor.stride(), tensor.dtype, *bits

    def read(self, requests: Sequence[Wanted]) -> None:
        """Fill the given memory; to verify a checksum, whole storages are read, each once."""
        reads: dict[TensorRecord, ItemRead] = {}
        strided: list[tuple[Wanted, StoredTensor]] = []
        parts: dict[Record, str] = {}
        for request in requests:
            tensor = self._stored_tensors[request.name]
            if isinstance(tensor, torch.Tensor):
                _copy(request, tensor)
                continue
            if tensor.whole is None:
                parts[tensor.record] = request.name
            if (tensor_record := tensor.found) is None:
                strided.append((request, tensor))
            else:
                read = reads.setdefault(tensor_record, self._item_read(request.name, tensor_record))
                read.copies.append(Copy(request.chunk, request.into.detach()))
        self._verify_records(parts)
        read_tensors(self.path.parent, reads.values(), self._expected)
        self._verified.update(tensor_record.record for tensor_record in reads)
        for request, tensor in strided:
            self._read_strided(request, tensor)

    def read_object(self, name: str) -> object:
        """The value of an object."""
        value = self._values[name]
        try:
            if not _kinds(value):
                return value
        except RecursionError as error:
            raise unreadable(self.path, error) from error
        needed = [self._files[record_name] for record_name in storage_records(value) if record_name in self._files]
        self._verify_records({record: f"{name} ({record.name})" for record in needed})
        node: Any = self._read_by_torch
        for key in self.paths[name]:
            node = node[key]
        return node

    def names_of_records(self) -> Mapping[str, Sequence[str]]:
        """The names of the values that refer to each record; a record may be absent from the archive."""
        names_by_record: dict[str, dict[str, None]] = {}
        for name, value in (*self._stored_tensors.items(), *self._values.items()):
            records_read = [value.record.name] if isinstance(value, StoredTensor) else []
            # A DTensor refers to the record of its mesh too.
            for record in (*records_read, *storage_records(reduce(getitem, self.paths[name], self._root))):
                names_by_record.setdefault(record, {})[name] = None
        return {record: [*names] for record, names in names_by_record.items()}

    @property
    def _expected(self) -> Expected | None:
        return (lambda _: None) if self._verify else None

    def _open(self) -> tuple[Any, dict[str, Record]]:
        try:
            with self.path.open("rb") as file:
                files = records(file) if zipfile.is_zipfile(file) else {}
                if files and is_little_endian(file, files):
                    content = read_record(file, files["data.pkl"])
                    return read_pickle(content, knows=lambda *_: True), files
        except Exception as error:  # A garbage file can raise any exception.
            raise unreadable(self.path, error) from error
        self._verify_records({record: record.name for record in files.values()})
        return self._read_by_torch, {}

    @cached_property
    def _read_by_torch(self) -> Any:
        is_archive = zipfile.is_zipfile(self.path)
        try:
            return torch.load(self.path, map_location="cpu", weights_only=not self._trust, mmap=is_archive)
        except Exception as error:
            if not self._trust and (unknown := unsafe_types(self.path, error)):
                raise CheckpointUntrusted(str(self.path), unknown) from None
            raise unreadable(self.path, error) from error

    def _dict_of(self, root: object) -> dict[Any, Any]:
        if isinstance(root, Inert) and stored_tensor(root, self._files) is None:
            if not self._trust:
                raise CheckpointUntrusted(str(self.path), root.kind)
            self._verify_records({record: record.name for record in self._files.values()})
            root = self._read_by_torch
        if isinstance(root, nn.Module):
            root = root.state_dict()
        if not isinstance(root, dict):
            raise FormatUnknown(
                str(self.path),
                _kind(root),
                expected="a dict of named tensors",
                way_out="Load it with torch.load, and save it under a name: torch.save({'weight': tensor}, path).",
            )
        return root

    def _add(self, keys: Keys, value: object) -> None:
        name = ".".join(map(str, keys))
        if name in self.paths:
            raise CheckpointDamaged(str(self.path), f"two values have the name {name!r}: {self.paths[name]} and {keys}")
        self.paths[name] = keys
        if isinstance(value, StoredTensor) or (isinstance(value, torch.Tensor) and _has_boxes(value)):
            self._stored_tensors[name] = value
        else:
            self._values[name] = value

    def _item_read(self, name: str, tensor_record: TensorRecord) -> ItemRead:
        item = DcpItem(self.path.name, 0, tensor_record.record.start + tensor_record.record.length)
        is_verified = tensor_record.record in self._verified
        return ItemRead(name=name, item=item, sizes=tensor_record.shape, found=tensor_record, is_verified=is_verified)

    def _verify_records(self, names: Mapping[Record, str]) -> None:
        """Verify whole records by checksum: a part of a record has no checksum, and torch verifies none."""
        reads = [whole_read(self.path, record, name) for record, name in names.items() if record not in self._verified]
        read_tensors(self.path.parent, reads, self._expected)
        self._verified.update(names)

    def _read_strided(self, request: Wanted, tensor: StoredTensor) -> None:
        """Read a tensor stored in another order, with gaps or with bits: the whole span is read, and viewed."""
        if 0 in tensor.shape:
            return
        elements = torch.empty(tensor.span.shape, dtype=tensor.dtype)
        read = self._item_read(request.name, tensor.span)
        read.copies.append(Copy(whole_box(elements.shape), elements))
        read_tensors(self.path.parent, [read], self._expected)
        _copy(request, tensor.view(elements))


def archive_records(path: Path) -> dict[str, Record]:
    """The records of a file by name, at places confirmed by torch; empty for a file from before torch 1.6.

    Raises:
        CheckpointDamaged: The archive's directory or headers are inconsistent, or torch reads other places.
    """
    try:
        with path.open("rb") as file:
            files = records(file) if zipfile.is_zipfile(file) else {}
        if files:
            check_places(path, files)
    except Exception as error:  # A garbage file can raise any exception.
        raise unreadable(path, error) from error
    return files


def whole_read(path: Path, record: Record, name: str) -> ItemRead:
    """A read of all bytes of a record, only to verify the checksum."""
    all_bytes = TensorRecord((record.length,), torch.uint8, record)
    return ItemRead(
        name=name, item=DcpItem(path.name, 0, record.start + record.length), sizes=all_bytes.shape, found=all_bytes
    )


def _copy(request: Wanted, tensor: torch.Tensor) -> None:
    with torch.no_grad():
        request.into.copy_(tensor[tuple(slice(along.start, along.stop) for along in request.chunk.ranges)])


def _leaves(node: object, files: Mapping[str, Record], path: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Tensors and other values, with the keys on the path to each.

    Lists are values, unless they contain something to name; dicts with unusable keys are values too.
    """
    tensor = _tensor(node, files)
    if tensor is not None:
        yield path, tensor
    elif isinstance(node, dict) and node and all(isinstance(key, str | int) for key in node):
        for key, value in node.items():
            yield from _leaves(value, files, (*path, key))
    elif isinstance(node, list | tuple) and any(_is_named(child, files) for child in node):
        for index, value in enumerate(node):
            yield from _leaves(value, files, (*path, index))
    else:
        yield path, node


def _is_named(node: object, files: Mapping[str, Record]) -> bool:
    if isinstance(node, list | tuple):
        return any(_is_named(child, files) for child in node)
    return isinstance(node, dict) or _tensor(node, files) is not None


def _tensor(node: object, files: Mapping[str, Record]) -> StoredTensor | torch.Tensor | None:
    if isinstance(node, torch.Tensor):
        return node if _has_boxes(node) else None
    return stored_tensor(node, files) or held_whole(node, files)


def _has_boxes(tensor: torch.Tensor) -> bool:
    """Whether boxes of a tensor can be read. Any other tensor, sparse or quantised, is a value, as in an archive."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _kinds(value: object) -> set[str]:
    """The types of all stand-ins in a value."""
    if isinstance(value, Inert):
        return {value.kind}
    if isinstance(value, dict):
        return {kind for pair in value.items() for child in pair for kind in _kinds(child)}
    if isinstance(value, list | tuple | set | frozenset):
        return {kind for child in value for kind in _kinds(child)}
    return {getattr(value, "kind", "")} - {""}


def _kind(value: object) -> str:
    return "one tensor without a name" if isinstance(value, Inert | torch.Tensor) else f"a {type(value).__name__}"
