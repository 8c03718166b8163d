import torch

from lamella_buffers import Payload, by_dtype, of_one_dtype, pack, unpack


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
    """A rank's part of the packed tensor is what that rank packs of its shards."""
    wholes = [torch.arange(6), torch.arange(10, 13)]
    packed = pack(wholes, torch.empty(9, dtype=torch.int64), 3)
    assert packed.tolist() == [0, 1, 10, 2, 3, 11, 4, 5, 12]
    back = [torch.zeros_like(whole) for whole in wholes]
    unpack(packed, back, 3)
    assert [tensor.tolist() for tensor in back] == [whole.tolist() for whole in wholes]


def test_payloads_of_several_dtypes_become_bytes_of_the_same_memory() -> None:
    mixed = [_payload(1, 2, torch.float32), _payload(2, 3, torch.bfloat16)]
    as_bytes = of_one_dtype(mixed)
    assert [payload.shard.dtype for payload in as_bytes] == [torch.uint8, torch.uint8]
    as_bytes[1].full.zero_()
    assert mixed[1].full.tolist() == [0] * 9
    assert of_one_dtype(mixed[:1])[0] is mixed[0]


def test_payloads_are_grouped_by_dtype_in_the_order_in_which_dtypes_come() -> None:
    a, b, c = _payload(1, 2, torch.float32), _payload(2, 2, torch.bfloat16), _payload(3, 2, torch.float32)
    assert [[id(payload) for payload in same] for same in by_dtype([a, b, c])] == [[id(a), id(c)], [id(b)]]
