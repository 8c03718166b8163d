"""Sums of arrived pieces and a rank's own as one Triton kernel for many payloads.

Own pieces are read from autograd's memory. For a sum by `torch.mean` own pieces would be copied beside the arrived ones
first: a third of the sum's bytes, on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a program
_ALIGNMENT = 16  # bytes, and elements: with every address and offset a multiple, a thread moves whole vectors
_MOST = 16  # payloads of a launch, an argument each: gradients lie elsewhere in each backward
_CACHED = 1 << 12  # tables: a few a unit, some hundred bytes each


class _Table(NamedTuple):
    """A kernel's lasting arguments, for shards in one storage.

    Attributes:
        lines: (payloads, 4), int64: a payload's first program, offsets in arrivals and shards, and elements.
        line_of: (programs,), int32: each program's payload.
        is_aligned: Whether all offsets and elements are multiples of `_ALIGNMENT`.
    """

    lines: torch.Tensor
    line_of: torch.Tensor
    is_aligned: bool


class Launch(NamedTuple):
    """A run of the kernel: the indices of its payloads, and their table."""

    payloads: list[int]
    table: _Table


def launches_for(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[Launch]:
    """The launches of a sum, one for each storage of shards and for each 16 payloads.

    Args:
        places: A (num_ranks, numel) tensor for each payload, a row a rank; all in one storage, with equal strides.
        shards: Flat, fp32.

    Effects: the first call with new sizes copies a table to the device, for which the host waits.
    """
    by_storage: dict[int, list[int]] = {}
    for i, shard in enumerate(shards):
        if shard.numel():
            by_storage.setdefault(shard.untyped_storage()._cdata, []).append(i)
    launches = []
    for indices in by_storage.values():
        for first in range(0, len(indices), _MOST):
            some = indices[first : first + _MOST]
            sizes = [(places[i].storage_offset(), shards[i].storage_offset(), shards[i].numel()) for i in some]
            launches.append(Launch(some, _table(tuple(sizes), places[0].device)))
    return launches


def add_up(
    launches: Sequence[Launch],
    places: Sequence[torch.Tensor],
    local_pieces: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    rank: int,
    *,
    averages: bool,
) -> None:
    """Reduce each payload's pieces into its shard, in fp32 and in the order of the ranks.

    Args:
        launches: The result of `launches_for`, for `places` and `shards`.
        places: The argument of `launches_for`. This rank's row is not read.
        local_pieces: This rank's flat pieces, anywhere, in the places' dtype.
        shards: The argument of `launches_for`.
        rank: This rank's place on the axis.
        averages: Divide by the number of ranks.

    Effects: kernels on the current stream, no host sync.
    """
    num_ranks = len(places[0])
    # From the start of the storage, as the table's offsets count.
    arrivals = places[0].as_strided((1,), (1,), 0)
    for payloads, table in launches:
        # At each call: autograd allocates gradients anew in each backward, and a vector load from an odd address is an
        # error.
        addresses = [local_pieces[i].data_ptr() for i in payloads]
        is_aligned = table.is_aligned and not any([address % _ALIGNMENT for address in addresses])
        _add_up[(len(table.line_of),)](
            arrivals,
            shards[payloads[0]].as_strided((1,), (1,), 0),
            table.lines,
            table.line_of,
            places[0].stride(0),
            *addresses,
            *addresses[:1] * (_MOST - len(addresses)),  # of the type that an address has
            rank=rank,
            num_ranks=num_ranks,
            factor=1.0 / num_ranks if averages else 1.0,
            elements=_ELEMENTS,
            alignment=_ALIGNMENT if is_aligned else 1,
        )


# By sizes, which are the same in every backward of a unit: the copy to the device makes the host wait.
@lru_cache(_CACHED)
def _table(sizes: tuple[tuple[int, int, int], ...], device: torch.device) -> _Table:
    numbers = [-(-numel // _ELEMENTS) for _, _, numel in sizes]
    lines = [(sum(numbers[:i]), *payload_sizes) for i, payload_sizes in enumerate(sizes)]
    return _Table(
        torch.tensor(lines, device=device),
        torch.arange(len(lines), dtype=torch.int32).repeat_interleave(torch.tensor(numbers)).to(device),
        all(number % _ALIGNMENT == 0 for payload_sizes in sizes for number in payload_sizes),
    )


_ADDRESSES = [f"address_{i}" for i in range(_MOST)]


# Else each pattern of aligned addresses would be compiled anew.
@triton.jit(do_not_specialize=[*_ADDRESSES])  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    arrivals,
    shards,
    lines,
    line_of,
    row_stride,
    address_0,
    address_1,
    address_2,
    address_3,
    address_4,
    address_5,
    address_6,
    address_7,
    address_8,
    address_9,
    address_10,
    address_11,
    address_12,
    address_13,
    address_14,
    address_15,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    factor: tl.constexpr,
    elements: tl.constexpr,
    alignment: tl.constexpr,
):
    program = tl.program_id(0)
    payload = tl.load(line_of + program)
    line = lines + payload * 4
    first = tl.multiple_of((program - tl.load(line)) * elements, alignment)
    place = tl.multiple_of(tl.load(line + 1), alignment) + first
    into = tl.multiple_of(tl.load(line + 2), alignment) + first
    # Within a chunk 32 bits suffice, and arithmetic on vectors of 64 bits would take longer than the memory.
    num_elements = tl.multiple_of(tl.minimum(tl.load(line + 3) - first, elements).to(tl.int32), alignment)
    within = tl.arange(0, elements)
    exists = within < num_elements

    address = _chosen(payload, 0, address_0, address_1, address_2, address_3)
    address = tl.where(payload >= 4, _chosen(payload, 4, address_4, address_5, address_6, address_7), address)
    address = tl.where(payload >= 8, _chosen(payload, 8, address_8, address_9, address_10, address_11), address)
    address = tl.where(payload >= 12, _chosen(payload, 12, address_12, address_13, address_14, address_15), address)
    # Triton takes an address below 2^31 for 32 bits, which no pointer has: a heap on the CPU can lie so low.
    pointer = address.to(tl.int64).to(tl.pointer_type(arrivals.dtype.element_ty))
    local_piece = tl.multiple_of(pointer, alignment) + first

    total = tl.full((elements,), 0.0, tl.float32)
    for peer in tl.static_range(num_ranks):
        piece = local_piece if peer == rank else arrivals + (place + peer * tl.cast(row_stride, tl.int64))
        total += tl.load(piece + within, mask=exists, other=0.0).to(tl.float32)
    tl.store(shards + into + within, total * factor, mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _chosen(payload, first: tl.constexpr, one, two, three, four):  # type: ignore[no-untyped-def]
    """The address of one of four payloads."""
    return tl.where(
        payload < first + 2, tl.where(payload == first, one, two), tl.where(payload == first + 2, three, four)
    )
