import pytest
import torch

from lamella_buffers import Payload, by_dtype, of_one_dtype, pack, unpack
from lamella_buffers._payload import Filling, Payloads


def _payload(value: int, numel: int, dtype: torch.dtype, num_ranks: int = 3) -> Payload:
    return Payload(torch.full((numel,), value, dtype=dtype), torch.full((num_ranks * numel,), value, dtype=dtype))


def test_shards_are_packed_one_after_another_and_come_back() -> None:
    shards = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0], [4.0], [5.0]])]
    packed = pack(shards, torch.empty(5))
    assert packed.tolist() == [1, 2, 3, 4, 5]
    back = [torch.empty_like(shard) for shard in shards]
    unpack(packed, back)
    assert [tensor.tolist() for tensor in back] == [shard.tolist() for shard in shards]


def test_wholes_are_packed_rank_by_rank_and_come_back() -> None:
    """A rank's part of the packed tensor equals the rank's packed shards."""
    wholes = [torch.arange(6), torch.arange(10, 13)]
    packed = pack(wholes, torch.empty(9, dtype=torch.int64), 3)
    assert packed.tolist() == [0, 1, 10, 2, 3, 11, 4, 5, 12]
    back = [torch.zeros_like(full_tensor) for full_tensor in wholes]
    unpack(packed, back, 3)
    assert [tensor.tolist() for tensor in back] == [full_tensor.tolist() for full_tensor in wholes]


def test_payloads_of_several_dtypes_become_bytes_of_the_same_memory() -> None:
    mixed = [_payload(1, 2, torch.float32), _payload(2, 3, torch.bfloat16)]
    as_bytes = of_one_dtype(mixed)
    assert [payload.shard.dtype for payload in as_bytes] == [torch.uint8, torch.uint8]
    as_bytes[1].full.zero_()
    assert mixed[1].full.tolist() == [0] * 9
    assert of_one_dtype(mixed[:1])[0] is mixed[0]


def test_payloads_are_grouped_by_dtype_in_the_order_in_which_dtypes_come() -> None:
    a, b, c = _payload(1, 2, torch.float32), _payload(2, 2, torch.bfloat16), _payload(3, 2, torch.float32)
    assert [[id(payload) for payload in group] for group in by_dtype([a, b, c])] == [[id(a), id(c)], [id(b)]]


@pytest.mark.parametrize("num_first", range(8))
def test_items_are_written_once_each_and_before_the_first_of_their_payloads_is_sent(num_first: int) -> None:
    """Three items of two, one and three payloads, and in between a payload already written."""
    written: list[str] = []
    moved = [_payload(0, 1, torch.uint8) for _ in range(7)]
    filling = Filling(lambda names, absent: written.extend(names), (["a", "b", "c"], None), (0, 2, 4))
    payloads = Payloads(moved, [filling])
    payloads.fill_first(num_first)
    assert written == [name for name, begin in zip("abc", (0, 2, 4), strict=True) if begin < num_first]
    payloads.fill_after_first(num_first)
    assert written == ["a", "b", "c"]
    payloads.fill()
    assert written == ["a", "b", "c"] * 2


def test_joined_gathers_write_all_items_of_one_function_by_one_call() -> None:
    calls: list[tuple[list[int], list[int] | None]] = []

    def fill(items: list[int], partners: list[int] | None) -> None:
        calls.append((items, partners))

    def one(item: int, partners: list[int] | None) -> Payloads:
        return Payloads([_payload(item, 1, torch.uint8)], [Filling(fill, ([item], partners), (0,))])

    joined = Payloads.joined([one(1, None), Payloads([_payload(0, 1, torch.uint8)]), one(2, None), one(3, [3])])
    assert [int(shard) for shard in joined.shards] == [1, 0, 2, 3]
    joined.fill()
    assert calls == [([1, 2], None), ([3], [3])]
    calls.clear()
    joined.fill_first(2)
    assert calls == [([1], None)]
