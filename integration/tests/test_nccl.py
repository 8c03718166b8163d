"""On GPUs over NCCL: parity, bytes, streams, overlap and zero-copy. The marker says how many GPUs a test needs.

The parent never touches a GPU, so that ranks can be forked: all GPU work runs in `run_ranks`.
"""

from collections.abc import Callable, Iterable
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # `full_tensor` and optimizers import torch._dynamo: imported once here, instead of once a rank.
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import record_function

from lamella_buffers import Allocator, CachingAllocator
from lamella_engine import MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_integration import bench
from lamella_integration.backends import BACKENDS, Workload, lamella
from lamella_integration.collectives import CollectiveCounter
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss
from lamella_integration.profile import NUM_STEPS, PROOF, parameter_sizes, profile_steps
from lamella_integration.reference import init_weights
from lamella_integration.report import Measurement
from lamella_integration.tasks import TASKS, Trace, TrainingSettings, shard, train, unsharded
from lamella_integration.trace import check_zero_copy, parameter_copies
from lamella_testing import run_ranks
from lamella_trace import Kernel, KernelKind, streams_of

ONE = pytest.param(1, marks=pytest.mark.gpu1)
TWO = pytest.param(2, marks=pytest.mark.gpu2)
FOUR = pytest.param(4, marks=pytest.mark.gpu4)
ALL_RANKS = pytest.mark.parametrize("num_ranks", [ONE, TWO, FOUR])
MANY_RANKS = pytest.mark.parametrize("num_ranks", [TWO, FOUR])

# As in test_parity, but a GPU sums in yet another order: near-zero gradients may move a weight by a third of a step.
# A GPU's matmuls also round differently for every batch size, and a gradient's norm sums all rounding errors.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3

MIB = 2**20
NUM_TOKENS = 1021  # Primes: see `profile`.
MANY_TOKENS = 32749


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _assert_close(actual: Trace, expected: Trace) -> None:
    torch.testing.assert_close(actual.losses, expected.losses, rtol=LOSS_TOLERANCE, atol=0.0)
    torch.testing.assert_close(actual.grad_norms, expected.grad_norms, rtol=NORM_TOLERANCE, atol=0.0)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


# -- parity ----------------------------------------------------------------------------------------------------------


@ALL_RANKS
def test_fp32_training_takes_the_steps_of_one_unsharded_gpu(num_ranks: int) -> None:
    recipe = TrainingSettings(max_norm=1.0)

    def unsharded_traces() -> dict[str, Trace]:
        return {name: train(task, task.model(device=_cuda()), recipe) for name, task in TASKS.items()}

    def sharded_traces() -> dict[str, Trace]:
        return {
            name: train(task, shard(task.model(device=_cuda()), fully_shard), recipe) for name, task in TASKS.items()
        }

    [expected] = run_ranks(unsharded_traces, 1, device="cuda")
    for traces in run_ranks(sharded_traces, num_ranks, device="cuda"):
        for name, trace in traces.items():
            _assert_close(trace, expected[name])


@pytest.mark.gpu2
@pytest.mark.parametrize("reduce_every_microbatch", [True, False])
def test_microbatches_accumulate_as_on_one_unsharded_gpu(reduce_every_microbatch: bool) -> None:
    task = TASKS["llama"]
    recipe = TrainingSettings(num_steps=8, num_microbatches=2, reduce_every_microbatch=reduce_every_microbatch)
    [expected] = run_ranks(lambda: train(task, task.model(device=_cuda()), recipe), 1, device="cuda")
    traces = run_ranks(lambda: train(task, shard(task.model(device=_cuda()), fully_shard), recipe), 2, device="cuda")
    for trace in traces:
        _assert_close(trace, expected)


BF16, FP32 = torch.bfloat16, torch.float32


@ALL_RANKS
@pytest.mark.parametrize(
    ("reduce_dtype", "sum_dtype", "allocator"),
    [(FP32, FP32, None), (BF16, FP32, None), (BF16, BF16, CachingAllocator())],
    ids=["reduce_fp32", "reduce_bf16", "reduce_bf16_by_rings"],
)
def test_bf16_training_equals_torch_fsdp2(
    num_ranks: int, reduce_dtype: torch.dtype, sum_dtype: torch.dtype, allocator: Allocator | None
) -> None:
    """Bit by bit on one and two ranks, since a sum has a single order. Sums over copy engines are in fp32.

    Among four, NCCL's rings run through the ranks in different orders, and a flat buffer and grouped tensors are spread
    over rings differently: sums may differ by the rounding of bf16.
    """
    recipe = TrainingSettings(num_steps=10, max_norm=1.0)
    loss_tolerance, weight_tolerance = (0.0, 0.0) if num_ranks <= 2 else (2**-8, 2 * recipe.learning_rate)

    def traces() -> dict[str, tuple[Trace, Trace]]:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        options = ShardingOptions(allocator=allocator)
        torch_policy = TorchMixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=sum_dtype)
        return {
            name: (
                train(task, shard(task.model(device=_cuda()), fully_shard, mp_policy=policy, options=options), recipe),
                train(task, shard(task.model(device=_cuda()), torch_fully_shard, mp_policy=torch_policy), recipe),
            )
            for name, task in TASKS.items()
        }

    for results in run_ranks(traces, num_ranks, device="cuda"):
        for ours, theirs in results.values():
            torch.testing.assert_close(ours.losses, theirs.losses, rtol=loss_tolerance, atol=0.0)
            torch.testing.assert_close(ours.grad_norms, theirs.grad_norms, rtol=loss_tolerance, atol=0.0)
            torch.testing.assert_close(ours.weights, theirs.weights, rtol=0.0, atol=weight_tolerance)


@ALL_RANKS
def test_a_model_built_on_meta_starts_with_the_weights_of_one_built_whole(num_ranks: int) -> None:
    task = TASKS["odd"]

    def differing() -> list[str]:
        with torch.device("meta"):
            model = task.build()
        shard(model, fully_shard).to_empty(device="cuda")
        init_weights(model, 0)
        built_parameters = dict(task.model(device=_cuda()).named_parameters())
        pairs = {
            name: (unsharded(weight.detach()), built_parameters[name]) for name, weight in model.named_parameters()
        }
        return [name for name, (weight, expected) in pairs.items() if not torch.equal(weight, expected)]

    assert run_ranks(differing, num_ranks, device="cuda") == [[]] * num_ranks


# -- bytes -----------------------------------------------------------------------------------------------------------

# Blocks of 116 MiB in bf16 beside next to no activations: a unit too many cannot hide.
WIDE = LlamaConfig(dim=2048, num_layers=8, num_heads=16, num_kv_heads=4, ffn_dim=8192, vocab_size=4096)
FEW_TOKENS = 32
SLACK = 16 * MIB  # Activations and temporaries: 32 tokens of 4096 logits are half a MiB in fp32.
CUBLAS = 64 * MIB  # cuBLAS's workspaces come from the same allocator.


def _allocated() -> int:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


@ALL_RANKS
def test_at_rest_a_rank_holds_its_shards_and_their_optimizer_state(num_ranks: int) -> None:
    def at_rest() -> tuple[int, list[int]]:
        before = _allocated()
        training = BACKENDS["lamella"](Workload(config=WIDE, device=_cuda()))
        built = _allocated() - before
        tokens, labels = Workload(config=WIDE, device=_cuda()).batch(FEW_TOKENS)
        stepped = []
        for _ in range(3):
            training.step(tokens, labels)
            stepped.append(_allocated() - before)
        return built, stepped

    with torch.device("meta"):
        shard_nbytes = _numel(Llama(WIDE).parameters()) * torch.float32.itemsize // num_ranks
    for built, stepped in run_ranks(at_rest, num_ranks, device="cuda"):
        assert shard_nbytes <= built <= shard_nbytes + MIB
        assert 3 * shard_nbytes <= stepped[0] <= 3 * shard_nbytes + 2 * MIB
        assert stepped[1] == stepped[2] == stepped[0]


@MANY_RANKS
def test_a_step_needs_two_unsharded_units_and_two_units_gradients_beside_the_root(num_ranks: int) -> None:
    def peak() -> int:
        before = _allocated()
        workload = Workload(config=WIDE, device=_cuda())
        training = BACKENDS["lamella"](workload)
        batch = workload.batch(FEW_TOKENS)
        for _ in range(2):
            training.step(*batch)
        for _ in range(2):  # The second backward adds to reduced gradients, present all the time: nothing can hide.
            _allocated()
            torch.cuda.reset_peak_memory_stats()
            next_token_loss(training.model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.device("meta"):
        model = Llama(WIDE)
    block = _numel(model.blocks[0].parameters())
    everything = _numel(model.parameters())
    root = everything - WIDE.num_layers * block
    states = 3 * everything * 4 // num_ranks  # main weights and both moments
    gradients = everything * 4 // num_ranks  # reduced, waiting for the optimizer
    unsharded_units = 2 * (root + 2 * block)
    # A unit's reduced shards (bf16, and cast to fp32) exist once the previous unit has freed its gradients.
    unreduced_gradients = 2 * (root + 2 * block)
    bound = states + gradients + unsharded_units + unreduced_gradients + SLACK + CUBLAS
    assert 2 * block > SLACK + CUBLAS, "The slack must not hide a unit."
    for nbytes in run_ranks(peak, num_ranks, device="cuda"):
        assert nbytes <= bound, f"{nbytes / MIB:.0f} MiB of {bound / MIB:.0f} MiB"


@MANY_RANKS
def test_a_step_makes_one_collective_a_unit_and_pass_and_moves_each_byte_once(num_ranks: int) -> None:
    def counted() -> tuple[dict[str, int], int, int]:
        workload = Workload(config=PROOF, device=_cuda())
        training = BACKENDS["lamella"](workload)
        batch = workload.batch(FEW_TOKENS)
        training.step(*batch)
        with CollectiveCounter() as counter:
            next_token_loss(training.model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        return counter.counts(), counter.nbytes("all_gather"), counter.nbytes("all_to_all")

    with torch.device("meta"):
        model = Llama(PROOF)
    blocks, everything = _numel(model.blocks.parameters()), _numel(model.parameters())
    num_blocks = PROOF.num_layers
    expected = (
        {"all_gather": 2 * num_blocks + 1, "all_to_all": num_blocks + 1},
        2 * (blocks + everything),
        2 * everything,
    )
    assert run_ranks(counted, num_ranks, device="cuda") == [expected] * num_ranks


# -- streams, overlap, zero-copy -------------------------------------------------------------------------------------


def _profiled(
    backend: str, num_tokens: int = NUM_TOKENS, prepare: Callable[[nn.Module], object] = lambda model: None
) -> list[Kernel]:
    workload = Workload(config=PROOF, device=_cuda())
    training = BACKENDS[backend](workload)
    prepare(training.model)
    return profile_steps(training, *workload.batch(num_tokens))


@pytest.mark.alone
@MANY_RANKS
def test_gathers_reductions_and_compute_have_streams_of_their_own_and_overlap(num_ranks: int) -> None:
    """Both are copies to peers; after a reduction's copies the reduction's stream adds up the arrived gradients."""

    def check() -> None:
        kernels = _profiled("lamella", MANY_TOKENS)
        adding = {kernel.stream for kernel in kernels if kernel.name == "_add_up"}
        pushes = [kernel for kernel in kernels if "PtoP" in kernel.name]
        gathers = [kernel for kernel in pushes if kernel.stream not in adding]
        reductions = [kernel for kernel in pushes if kernel.stream in adding]
        compute = streams_of(kernels, KernelKind.MATMUL, KernelKind.ATTENTION, KernelKind.OPTIMIZER)
        streams = [{kernel.stream for kernel in some} for some in (gathers, reductions)] + [compute]
        assert [len(stream_ids) for stream_ids in streams] == [1, 1, 1]
        assert len(set.union(*streams)) == 3
        assert not streams_of(kernels, KernelKind.ALL_GATHER, KernelKind.REDUCE_SCATTER)
        computing = [kernel for kernel in kernels if kernel.stream in compute]
        for verb, some in (("gathers", gathers), ("reductions", reductions)):
            hidden = [kernel for kernel in some if any(_overlap(kernel, other) for other in computing)]
            hidden_us, all_us = (sum(kernel.duration_us for kernel in stream_ids) for stream_ids in (hidden, some))
            # The first gather and the last reduction of a step have nothing to hide behind.
            assert hidden_us >= all_us / 2, f"{verb}: {hidden_us:.0f} us of {all_us:.0f}"

    run_ranks(check, num_ranks, device="cuda")


def _overlap(a: Kernel, b: Kernel) -> bool:
    return a.start_us < b.end_us and b.start_us < a.end_us


@pytest.mark.parametrize(
    ("num_ranks", "shape"),
    [pytest.param(2, (2, 1), marks=pytest.mark.gpu2), pytest.param(4, (2, 2), marks=pytest.mark.gpu4)],
)
def test_replicas_are_reduced_over_on_a_stream_of_their_own_while_compute_goes_on(
    num_ranks: int, shape: tuple[int, int]
) -> None:
    def check() -> None:
        workload = Workload(config=PROOF, device=_cuda())
        training = lamella(workload, mesh=shape)
        kernels = profile_steps(training, *workload.batch(MANY_TOKENS))
        reductions = [kernel for kernel in kernels if "allreduce" in kernel.name.lower().replace("_", "")]
        assert len(reductions) == NUM_STEPS * (PROOF.num_layers + 1), {kernel.name for kernel in kernels}
        busy_streams = streams_of(
            kernels,
            KernelKind.MATMUL,
            KernelKind.ATTENTION,
            KernelKind.OPTIMIZER,
            KernelKind.ALL_GATHER,
            KernelKind.REDUCE_SCATTER,
        )
        busy_streams |= {kernel.stream for kernel in kernels if "PtoP" in kernel.name}
        streams = {kernel.stream for kernel in reductions}
        assert len(streams) == 1
        assert streams.isdisjoint(busy_streams)
        computing = [kernel for kernel in kernels if kernel.kind in (KernelKind.MATMUL, KernelKind.ATTENTION)]
        hidden = [kernel for kernel in reductions if any(_overlap(kernel, other) for other in computing)]
        # The last reduction of a step has nothing to hide behind.
        assert len(hidden) >= len(reductions) / 2

    run_ranks(check, num_ranks, device="cuda")


@MANY_RANKS
def test_no_kernel_copies_a_parameter_or_a_gradient(num_ranks: int) -> None:
    def check() -> None:
        check_zero_copy(_profiled("lamella"), parameter_sizes(Workload(config=PROOF, device=_cuda()), NUM_TOKENS))

    run_ranks(check, num_ranks, device="cuda")


@pytest.mark.gpu2
def test_the_profile_finds_the_copies_of_fsdp2_and_a_planted_one() -> None:
    def clone_a_weight(block: nn.Module, _: object) -> None:
        block.get_parameter("ffn.up.weight").detach().clone()

    def plant(model: nn.Module) -> None:
        model.get_submodule("blocks.1").register_forward_pre_hook(clone_a_weight)

    def num_copies() -> tuple[int, int]:
        sizes = parameter_sizes(Workload(config=PROOF, device=_cuda()), NUM_TOKENS)
        planted = parameter_copies(_profiled("lamella", prepare=plant), sizes)
        return len(parameter_copies(_profiled("fsdp2"), sizes)), len(planted)

    for num_copies_of_fsdp2, planted in run_ranks(num_copies, 2, device="cuda"):
        assert num_copies_of_fsdp2 > 10
        assert planted == 2  # a copy a step


@pytest.mark.gpu1
def test_nsight_sees_phases_and_units_where_pytorch_emits_nvtx_ranges() -> None:
    def names() -> set[str]:
        opened: set[str] = set()

        def note(name: str) -> record_function:
            opened.add(name)
            return record_function(name)

        task = TASKS["llama"]
        model = shard(task.model(device=_cuda()), fully_shard)
        tokens, labels = (tensor.to(_cuda()) for tensor in task.batch(0))
        with patch("lamella_engine._common.labels.record_function", note), torch.autograd.profiler.emit_nvtx():  # type: ignore[no-untyped-call]
            task.loss(model(tokens), labels).backward()  # type: ignore[no-untyped-call]
        return opened

    [opened] = run_ranks(names, 1, device="cuda")
    for phase in ("pre_forward", "all_gather", "pre_backward", "post_backward_reduce"):
        assert f"FSDP::{phase} (blocks.0)" in opened


# -- the benchmark ---------------------------------------------------------------------------------------------------


@ALL_RANKS
@pytest.mark.parametrize("setting", ["", "--units ends --microbatches 2", "--checkpoint --compile aot_eager"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # The compiler reads `.grad`.
def test_the_benchmark_runs_and_its_losses_agree(num_ranks: int, setting: str) -> None:
    backends = ["ideal", "lamella", "lamella:allocator=mempool,keep=1MiB", "lamella:graph=true", "fsdp2", "ddp"]
    options = bench.parse_options(
        ["--size", "tiny", "--tokens", "256", "--backends", *backends, "--steps", "4", *setting.split()]
    )

    def report() -> tuple[bool, str]:
        report_of_run = bench.run(options, _cuda())
        return report_of_run.is_sound(), report_of_run.markdown()

    for is_sound, markdown in run_ranks(report, num_ranks, device="cuda"):
        assert is_sound, markdown
        assert "leaked" not in markdown, markdown


@MANY_RANKS
def test_the_benchmark_tells_where_the_time_of_each_backend_goes(num_ranks: int) -> None:
    options = bench.parse_options(
        ["--size", "tiny", "--tokens", "256", "--backends", "ideal", "lamella", "fsdp2", "--steps", "1", "--phases"]
    )

    def measurements() -> dict[str, Measurement]:
        return bench.run(options, _cuda()).measurements()

    for name, row in run_ranks(measurements, num_ranks, device="cuda")[0].items():
        assert not row.trouble
        assert row.phases is not None
        assert row.host is not None
        assert 0 < row.phases.compute_ms < row.phases.span_ms
        assert 0 < row.phases.optimizer_ms < row.phases.span_ms
        assert (row.phases.collectives_ms > 0) == (name != "ideal")
        assert 0 <= row.phases.exposed_ms <= row.phases.collectives_ms
        assert row.host.total_us > row.host.above_ideal_us
