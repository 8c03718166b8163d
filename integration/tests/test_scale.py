"""Plans of 16,384 ranks that do not exist: bytes by arithmetic, traffic by axis, and nothing that grows with both."""

import gc
import tracemalloc
from math import prod
from typing import Any, cast

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_engine.testing import named_units, require_unit
from lamella_integration.scale import main
from lamella_integration.scale_checkpoint import SimulatedState, checkpoint_files, save_plan
from lamella_integration.scale_models import MODELS, ModelShapes, llama
from lamella_integration.scale_plan import RankPlan, ScaleCase, gathered_numel, rank_plan

LLAMA, DEEPSEEK = MODELS["llama-tiny"], MODELS["deepseek-tiny"]
MANY = 16384


def rows_of(num_rows: int, num_ranks: int, rank: int) -> int:
    """Rows of a rank by torch's rule, from its definition."""
    most = -(-num_rows // num_ranks)
    return max(0, min(num_rows, (rank + 1) * most) - rank * most)


def test_published_models_have_their_published_sizes() -> None:
    assert MODELS["llama-405b"].numel() == 405_853_388_800
    assert MODELS["deepseek-v3"].numel() == 671_026_419_200


@pytest.mark.parametrize("num_replicas", [1, 128])
def test_the_ranks_own_every_element_once_in_each_replica(num_replicas: int) -> None:
    case = ScaleCase(
        shapes=LLAMA, num_ranks=MANY, mesh="fsdp" if num_replicas == 1 else "hsdp", num_replicas=num_replicas
    )
    for rank in (0, 3, case.num_shards - 1, MANY - 1):
        with rank_plan(case, rank) as plan:
            owned = {name: cast(DTensor, p).to_local().numel() for name, p in plan.model.named_parameters()}
        shard = rank % case.num_shards
        assert owned == {
            name: rows_of(shape[0], case.num_shards, shard) * prod(shape[1:]) for name, shape in LLAMA.named_shapes()
        }
    for _, shape in LLAMA.named_shapes():
        assert sum(rows_of(shape[0], case.num_shards, shard) for shard in range(case.num_shards)) == shape[0]


@pytest.mark.parametrize("is_flat", [False, True], ids=["even", "flat"])
@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "hfsdp"])
def test_a_step_moves_the_models_bytes_and_padding_along_each_axis(mesh: Any, is_flat: bool) -> None:
    num_replicas = 1 if mesh == "fsdp" else 16
    case = ScaleCase(shapes=LLAMA, num_ranks=256, mesh=mesh, num_replicas=num_replicas, is_flat=is_flat)
    with rank_plan(case, 3) as plan:
        main_nbytes, padding = plan.main_nbytes(), plan.padding_nbytes()
        outer = sum(
            2 * slot.numel
            for group in groups_of(plan)
            if group.transports.outer is not None
            for slot in group.main_weight.layout.wire_slots
        )
        moved = 2 * LLAMA.numel() + padding
        if not is_flat:
            assert moved == 2 * gathered_numel(case)
        root = 2 * root_gathered_numel(case) if not is_flat else root_nbytes(plan)
        received = plan.step_traffic()
    shards = case.num_shards
    assert received["shards", "gather"] == pytest.approx((2 * moved - root) * (shards - 1) / shards, abs=100)
    assert received["shards", "reduce-scatter"] == pytest.approx(moved * (shards - 1) / shards, abs=100)
    if mesh == "hsdp":
        assert received["replicas", "all-reduce"] == pytest.approx(main_nbytes * 15 / 16, rel=0.01)
    if mesh == "hfsdp":
        assert received["replicas", "gather"] == pytest.approx(outer * 15, abs=1000)


def groups_of(plan: RankPlan) -> list[Any]:
    return [group for _, unit in named_units(plan.model) for group in unit.parameters.groups]


def root_gathered_numel(case: ScaleCase) -> int:
    return gathered_numel(ScaleCase(shapes=ModelShapes(layers=(), ends=case.shapes.ends), num_ranks=case.num_shards))


def root_nbytes(plan: RankPlan) -> int:
    return sum(2 * group.layout.full_numel for group in require_unit(plan.model).parameters.groups)


def test_experts_are_cut_between_all_ranks_and_move_along_an_axis_of_their_own() -> None:
    case = ScaleCase(shapes=DEEPSEEK, num_ranks=64, num_experts_ranks=8)
    stacks = 2 * sum(prod(layer[name]) for layer in DEEPSEEK.layers for name in DEEPSEEK.expert_names & layer.keys())
    with rank_plan(case, 3) as plan:
        experts = [cast(DTensor, p) for name, p in plan.model.named_parameters() if ".experts." in name]
        assert {parameter.to_local().numel() * 64 for parameter in experts} == {p.numel() for p in experts}
        received = plan.step_traffic()
    # One expert of eight a rank, over eight data ranks: gathered twice, reduced once.
    assert received["experts_data", "gather"] == pytest.approx(2 * stacks / 8 * 7 / 8, rel=0.01)
    assert received["experts_data", "reduce-scatter"] == pytest.approx(stacks / 8 * 7 / 8, rel=0.01)


def traced_nbytes(num_ranks: int, num_layers: int, *, is_flat: bool) -> int:
    """Bytes of Python's objects that a plan keeps."""
    shapes = llama(num_layers=num_layers, dim=256, ffn_dim=832, kv_dim=64, vocab_size=1000)
    gc.collect()
    tracemalloc.start()
    try:
        with rank_plan(ScaleCase(shapes=shapes, num_ranks=num_ranks, is_flat=is_flat), 3) as plan:
            gc.collect()
            assert len(plan.model.layers) == num_layers
            return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_flat", [False, True], ids=["even", "flat"])
def test_no_structure_of_a_plan_grows_with_ranks_times_parameters(is_flat: bool) -> None:
    for num_ranks in (8, MANY):
        traced_nbytes(num_ranks, 1, is_flat=is_flat)  # Caches of the first call, which later layers share.
    layer_nbytes = [
        (traced_nbytes(num_ranks, 4, is_flat=is_flat) - traced_nbytes(num_ranks, 2, is_flat=is_flat)) / 2
        for num_ranks in (8, MANY)
    ]
    # A list of all ranks has 128 KiB, a layer 9 parameters.
    assert layer_nbytes[1] < layer_nbytes[0] + 65536


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mesh", ["fsdp", "hfsdp"])
def test_a_step_has_no_operator_a_rank(mesh: Any) -> None:
    counts = []
    for num_ranks, num_replicas in ((16, 4), (MANY, 128)):
        replicas = 1 if mesh == "fsdp" else num_replicas
        case = ScaleCase(shapes=LLAMA, num_ranks=num_ranks, mesh=mesh, num_replicas=replicas, is_flat=mesh == "hfsdp")
        with rank_plan(case, 3) as plan, Operators() as operators:
            plan.step_traffic()
        counts.append(operators.count)
    few, many = counts
    assert 100 < many < 2 * few


def test_a_save_sends_messages_and_writes_metadata_that_only_shards_make_longer() -> None:
    plans, files = [], None
    for num_ranks in (MANY, 128):  # Replicas of 64 shards.
        case = ScaleCase(shapes=LLAMA, num_ranks=num_ranks, mesh="hsdp", num_replicas=num_ranks // 64)
        with rank_plan(case, 3) as plan:
            state = SimulatedState(plan)
            plans.append(save_plan(state, 3))
            files = checkpoint_files(state) if num_ranks == 128 else None
    many, few = plans
    assert many.digests_nbytes < few.digests_nbytes + 100 < 1000
    assert many.placed_nbytes < few.placed_nbytes
    assert many.num_chunks == few.num_chunks
    assert files is not None
    assert files.num_names > 3 * len([*LLAMA.named_shapes()])


def test_the_command_prints_plans(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "llama-tiny", "--ranks", "8", "16", "--step"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1] for line in lines if line.startswith("llama-tiny")] == [" 8 ranks", " 16 ranks"]
    assert sum("step: shards, gather" in line for line in lines) == 2
