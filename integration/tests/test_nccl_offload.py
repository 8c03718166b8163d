"""On GPUs over NCCL: shards in host memory train equally, leave the GPU empty, and make the host wait once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
import torch.distributed as dist
from four_gpus import WAYS, mesh
from late_streams import LLAMA, ODD, assert_no_bit_changes_when_late
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from lamella_engine import CPUOffloadPolicy, MixedPrecisionPolicy, find_nonfinite, fully_shard, parameter_norms
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss
from lamella_integration.tasks import TASKS, Task, Trace, TrainingSettings, shard, train
from lamella_optim import clip_grad_norm_
from lamella_testing import run_ranks

ONE = pytest.param(1, marks=pytest.mark.gpu1)
TWO = pytest.param(2, marks=pytest.mark.gpu2)
FOUR = pytest.param(4, marks=pytest.mark.gpu4)
ALL_RANKS = pytest.mark.parametrize("num_ranks", [ONE, TWO, FOUR])

MIB = 2**20
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


HERE = [way for way in WAYS if way not in ("ZERO3", "HSDP, ZERO1", "HSDP, ZERO2")]


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _offloaded(task: Task, *, pin_memory: bool = True, **options: Any) -> Any:
    return shard(task.model(device=_cuda()), fully_shard, offload_policy=CPUOffloadPolicy(pin_memory), **options)


def _train(task: Task, model: Any, recipe: TrainingSettings) -> Trace:
    """Train as `tasks.train` does, with weights on the host, where NCCL cannot gather, and the batch on the GPU."""
    trace = Trace()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    num_ranks, num = dist.get_world_size(), recipe.num_microbatches
    for step in range(recipe.num_steps):
        inputs, labels = (tensor.chunk(num_ranks)[dist.get_rank()].to(_cuda()) for tensor in task.batch(step))
        losses: list[float] = [0.0] * num_ranks
        mine = 0.0
        for i, (x, y) in enumerate(zip(inputs.chunk(num), labels.chunk(num), strict=True)):
            model.set_requires_gradient_sync(i == num - 1 or recipe.reduce_every_microbatch)
            loss = task.loss(model(x), y) / num
            loss.backward()  # type: ignore[no-untyped-call]
            mine += loss.item()
        dist.all_gather_object(losses, mine)
        trace.losses.append(sum(losses) / num_ranks)
        assert recipe.max_norm is not None
        trace.grad_norms.append(clip_grad_norm_(model.parameters(), recipe.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: _full_value(parameter) for name, parameter in model.named_parameters()}
    return trace


def _full_value(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    on_gpu = DTensor(parameter.to_local().detach().to(_cuda()), parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return on_gpu.full_tensor().cpu()


def _assert_close(got: Trace, expected: Trace) -> None:
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got.grad_norms, expected.grad_norms, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(got.weights, expected.weights, rtol=0.0, atol=1e-3)


def _unsharded(recipe: TrainingSettings) -> list[Trace]:
    [traces] = run_ranks(
        lambda: [train(task, task.model(device=_cuda()), recipe) for task in (LLAMA, ODD)], 1, device="cuda"
    )
    return traces


# -- training --------------------------------------------------------------------------------------------------------


@ALL_RANKS
@pytest.mark.parametrize("pin_memory", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("reduces_each", [True, False], ids=["reduce_each", "reduce_last"])
def test_fp32_training_takes_the_steps_of_one_unsharded_gpu(
    num_ranks: int, pin_memory: bool, reduces_each: bool
) -> None:
    recipe = TrainingSettings(num_steps=8, num_microbatches=2, reduce_every_microbatch=reduces_each, max_norm=1.0)

    def traces() -> list[Trace]:
        return [_train(task, _offloaded(task, pin_memory=pin_memory), recipe) for task in (LLAMA, ODD)]

    expected = _unsharded(recipe)
    for got in run_ranks(traces, num_ranks, device="cuda"):
        for trace, expected_trace in zip(got, expected, strict=True):
            _assert_close(trace, expected_trace)


@pytest.mark.gpu4
@pytest.mark.parametrize("way", HERE)
def test_every_stage_takes_the_steps_of_one_unsharded_gpu(way: str) -> None:
    recipe = TrainingSettings(num_steps=8, num_microbatches=2, max_norm=1.0)
    expected = _unsharded(recipe)

    def traces() -> list[Trace]:
        return [_train(task, _offloaded(task, **WAYS[way]()), recipe) for task in (LLAMA, ODD)]

    for got in run_ranks(traces, 4, device="cuda"):
        for trace, expected_trace in zip(got, expected, strict=True):
            _assert_close(trace, expected_trace)


@pytest.mark.gpu2
def test_units_offloaded_to_the_cpu_may_train_beside_units_on_the_gpu() -> None:
    recipe = TrainingSettings(num_steps=8, max_norm=1.0)

    def traces() -> list[Trace]:
        measured = []
        for task in (LLAMA, ODD):
            model = task.model(device=_cuda())
            fully_shard(model.units()[0], offload_policy=CPUOffloadPolicy())
            for unit in model.units()[1:]:
                fully_shard(unit)
            fully_shard(model)
            assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "cuda"}
            measured.append(_train(task, model, recipe))
            assert find_nonfinite(model, of="weight") == []
        return measured

    expected = _unsharded(recipe)
    for got in run_ranks(traces, 2, device="cuda"):
        for trace, expected_trace in zip(got, expected, strict=True):
            _assert_close(trace, expected_trace)


@pytest.mark.gpu4
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing"
)  # torch warns for tokens as input; the hook fires nevertheless
@pytest.mark.parametrize("way", HERE)
def test_copies_that_are_late_at_random_change_no_bit(way: str) -> None:
    """A missing wait shows as gradients read, or shards written, too early."""
    recipe = TrainingSettings(num_steps=100, num_microbatches=2, max_norm=1.0)

    def sharded() -> Any:
        return _offloaded(LLAMA, mp_policy=BF16, **WAYS[way]())

    assert_no_bit_changes_when_late(LLAMA, sharded, recipe, num_ranks=4, training=_train)


# -- devices of tensors, and waits -----------------------------------------------------------------------------------

WIDE = LlamaConfig(dim=2048, num_layers=4, num_heads=16, num_kv_heads=4, ffn_dim=8192, vocab_size=4096)


def _allocated() -> int:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@ALL_RANKS
def test_at_rest_the_gpu_holds_nothing_and_the_host_holds_pinned_shards(num_ranks: int) -> None:
    def at_rest() -> list[int]:
        before = _allocated()
        with torch.device("meta"):
            model = Llama(WIDE)
        shard(model, fully_shard, offload_policy=CPUOffloadPolicy(), mp_policy=BF16).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor)
                parameter.to_local().normal_(std=0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        tokens = torch.zeros(1, 33, dtype=torch.int64, device=_cuda())
        nbytes = [_allocated() - before]
        for _ in range(2):
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                for tensor in (parameter, parameter.grad):
                    assert isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cuda"
                    assert tensor.to_local().device.type == "cpu"
                    assert tensor.to_local().is_pinned() or not tensor.to_local().numel()
            optimizer.step()
            optimizer.zero_grad()
            nbytes.append(_allocated() - before)
        return nbytes

    with torch.device("meta"):
        assert sum(parameter.nbytes for parameter in Llama(WIDE).blocks[0].parameters()) > 100 * MIB
    for nbytes in run_ranks(at_rest, num_ranks, device="cuda"):
        assert max(nbytes) <= MIB, [f"{num_bytes / MIB:.1f} MiB" for num_bytes in nbytes]


@contextmanager
def _host_waits() -> Iterator[list[int]]:
    """Count waits for events, and turn all further waits known to torch into errors."""
    waits: list[int] = []
    real = torch.cuda.Event.synchronize

    def synchronize(self: torch.cuda.Event) -> None:
        waits.append(1)
        real(self)

    torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = real  # type: ignore[method-assign]


def _step_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    tokens, labels = (tensor.chunk(dist.get_world_size())[0].to(_cuda()) for tensor in LLAMA.batch(0))
    return lambda: LLAMA.loss(model(tokens), labels)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@ALL_RANKS
def test_the_host_waits_at_the_end_of_backward_alone(num_ranks: int) -> None:
    def check() -> None:
        model = _offloaded(LLAMA, mp_policy=BF16)
        forward = _step_of(model)
        for _ in range(2):
            forward().backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
        with _host_waits() as waits:
            for num_backwards in range(1, 4):  # all but the first add to earlier gradients
                loss = forward()
                assert len(waits) == num_backwards - 1
                loss.backward()  # type: ignore[no-untyped-call]
                assert len(waits) == num_backwards

    run_ranks(check, num_ranks, device="cuda")


@ALL_RANKS
def test_offloaded_gathers_copy_once_to_the_gpu_and_reductions_once_to_the_host(num_ranks: int) -> None:
    def copies() -> list[str]:
        model = _offloaded(LLAMA, mp_policy=BF16)
        forward = _step_of(model)
        for _ in range(2):
            forward().backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            forward().backward()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return [event.name for event in profiler.events() if "HtoD" in event.name or "DtoH" in event.name]

    num_blocks = len(TASKS["llama"].build().units())
    for names in run_ranks(copies, num_ranks, device="cuda"):
        up, down = ([name for name in names if way in name] for way in ("HtoD", "DtoH"))
        assert len(up) == 2 * num_blocks + 1  # the outermost unit stays for its backward
        assert len(down) == num_blocks + 1
        assert all("Pinned" in name for name in names), names


# -- state dicts and optimizers --------------------------------------------------------------------------------------


@pytest.mark.gpu2
def test_pinned_shards_return_after_the_model_was_moved_and_unpinned_shards_are_refused() -> None:
    def check() -> None:
        for pin_memory in (True, False):
            model = _offloaded(ODD, pin_memory=pin_memory)
            x = ODD.batch(0)[0].to(_cuda())
            with torch.no_grad():
                expected = model(x)
                model.to("cuda")
                if pin_memory:
                    assert torch.equal(model(x), expected)
                else:
                    words = "FSDP parameters should be materialized on CPU when enabling CPU offloading"
                    with pytest.raises(RuntimeError, match=words):
                        model(x)
                    model.to("cpu")
                    assert torch.equal(model(x), expected)
            parameters: list[Any] = list(model.parameters())
            assert {parameter.device.type for parameter in parameters} == {"cpu"}
            assert {p.to_local().is_pinned() for p in parameters if p.to_local().numel()} == {pin_memory}

    run_ranks(check, 2, device="cuda")


@pytest.mark.gpu2
def test_norms_need_no_backend_for_the_cpu_and_torchs_clipping_does() -> None:
    def check() -> None:
        mixed_group = dist.new_group(backend="cpu:gloo,cuda:nccl")
        norms = []
        for axis in (mesh(2), DeviceMesh.from_group(mixed_group, "cuda")):
            model = _offloaded(ODD, mesh=axis)
            x, y = (tensor.to(_cuda()) for tensor in ODD.batch(0))
            ODD.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            norms.append(clip_grad_norm_(model.parameters(), 1e9))
            squares = sum(norm**2 for norm in parameter_norms(model).values())
            assert squares**0.5 == pytest.approx(norms[-1].item(), rel=1e-5)
            if axis is mesh(2):
                with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                assert isinstance(norm, DTensor)
                norms.append(norm.full_tensor())
        torch.testing.assert_close(norms[1:], norms[:1] * 2)

    run_ranks(check, 2, device="cuda")


@pytest.mark.gpu2
def test_an_optimizer_in_backward_reads_gradients_that_have_arrived() -> None:
    def weights() -> list[dict[str, torch.Tensor]]:
        weights_by_way = []
        for in_backward in (False, True):
            model = _offloaded(LLAMA, mp_policy=BF16)
            optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

            def step(parameter: nn.Parameter, optimizers: dict[Any, Any] = optimizers) -> None:
                optimizers[parameter].step()
                optimizers[parameter].zero_grad()

            if in_backward:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(step)
            forward = _step_of(model)
            for _ in range(20):
                forward().backward()  # type: ignore[no-untyped-call]
                if not in_backward:
                    for parameter in list(model.parameters()):
                        step(parameter)
            weights_by_way.append({name: _full_value(parameter) for name, parameter in model.named_parameters()})
        return weights_by_way

    for after, stepped_in_backward in run_ranks(weights, 2, device="cuda"):
        torch.testing.assert_close(stepped_in_backward, after, rtol=0.0, atol=0.0)
