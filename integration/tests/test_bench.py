"""The benchmark on gloo with a tiny model: rows, losses, failures, and the report."""

import json
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
import torch._dynamo  # The optimizer imports torch._dynamo: imported once here, instead of once a rank.
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lamella_integration import bench, phases, profile
from lamella_integration.backends import BACKENDS, Training, Workload
from lamella_integration.bench import parse_options, run
from lamella_integration.collectives import CollectiveCounter
from lamella_integration.llama import SIZES, Block, Llama, next_token_loss, num_flops_per_token
from lamella_integration.report import BenchmarkReport, Failure, HostTime, Measurement, Phases
from lamella_integration.variants import backend_of
from lamella_testing import load_compiler, run_ranks

# The compiler reads `.grad` of every tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CPU = torch.device("cpu")
TINY = Workload(config=SIZES["tiny"], device=CPU)
NUM_BLOCKS = TINY.config.num_layers
FSDP = pytest.mark.parametrize("backend", ["lamella", "fsdp2"])
HAS_REDUCTIONS_IN_FLIGHT = hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers")  # torch 2.13


def _run(*arguments: str, num_ranks: int = 2) -> BenchmarkReport:
    options = parse_options(["--device", "cpu", "--size", "tiny", "--tokens", "32", *arguments])
    return run_ranks(lambda: run(options, CPU), num_ranks)[0]


def _counts(backend: str, workload: Workload = TINY) -> dict[str, int]:
    """Collectives of a second step."""

    def counted() -> dict[str, int]:
        training = backend_of(backend)(workload)
        training.step(*workload.batch(8))
        with CollectiveCounter() as counter:
            training.step(*workload.batch(8))
        counts: dict[str, int] = counter.counts()
        return counts

    return run_ranks(counted, 2)[0]


def test_backends_that_train_alike_have_equal_losses(tmp_path: Path) -> None:
    report = _run(
        "--backends", "ideal", "lamella", "fsdp2", "ddp", "--steps", "3", "--warmup", "2", "--out", str(tmp_path)
    )
    rows = report.measurements()
    assert list(rows) == ["ideal", "lamella", "fsdp2", "ddp"]
    assert rows["lamella"].first_loss == rows["fsdp2"].first_loss == rows["ideal"].first_loss
    assert rows["lamella"].last_loss == rows["fsdp2"].last_loss < rows["lamella"].first_loss
    assert report.disagreements() == {}
    assert report.is_sound()
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["environment"].keys() >= {"python", "torch", "device"}
    steps_s = written["rows"]["lamella"]["steps_s"]
    assert len(steps_s) == 3
    assert 0 < rows["lamella"].step_s <= max(steps_s)
    assert written["rows"]["lamella"]["of_ideal"] == report.ratio("lamella", "ideal")
    assert (tmp_path / "report.md").read_text() == report.markdown()
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_rows_in_float8_compare_with_rows_of_their_format_alone() -> None:
    names = [f"lamella:float8={kind}" for kind in ("tensor", "delayed", "row", "block")]
    refused = "fsdp2:float8=row"
    report = _run("--backends", "ideal:float8=tensor", *names, "lamella", refused, "--steps", "2", "--warmup", "2")
    rows = report.measurements()
    assert list(rows) == ["ideal:float8=tensor", *names, "lamella"]
    losses = {name: row.first_loss for name, row in rows.items()}
    # *ideal* quantises weights rounded to bf16 before. Initial weights are rounded too: the numbers are equal.
    assert losses[names[0]] == losses[names[1]] == losses["ideal:float8=tensor"]
    assert len({*losses.values()}) == 4  # tensor, row, block, bf16
    assert all(rows[name].last_loss < rows[name].first_loss for name in names)
    assert report.disagreements() == {}
    failed = report.rows[refused]
    assert isinstance(failed, Failure)
    assert "Expected torchao or a recipe of Transformer Engine as float8 of fsdp2, got 'row'." in failed.error


def test_a_report_names_the_commit_if_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for command in (["init", "-q"], ["add", "bench.py"], ["commit", "-qm", "all"]):
        (tmp_path / "bench.py").touch()
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    commit = bench._commit()["commit"]
    assert len(commit) == 12
    (tmp_path / "bench.py").write_text("changed")
    assert bench._commit() == {"commit": f"{commit}-dirty"}
    monkeypatch.setattr(bench, "__file__", "/nowhere/bench.py")
    assert bench._commit() == {}


def test_sizes_that_prove_nothing_are_refused_on_every_rank_before_any_step() -> None:
    def refused() -> str:
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(profile, "process_group", lambda _: nullcontext(CPU))
        monkeypatch.setattr(profile, "profile_steps", lambda *_: pytest.fail("Expected no step."))
        try:
            profile.main(["--device", "cpu", "--size", "proof_small", "--tokens", "2"])
        except ValueError as error:
            return str(error)
        return "nothing"

    for error in run_ranks(refused, 2):
        assert "Expected sizes that tell shards, whole parameters and activations apart on 2 ranks" in error


def test_steps_that_overlap_with_other_things_lose_nothing() -> None:
    names = ["lamella", *(f"lamella:overlap_optimizer={mode}" for mode in ("true", "late"))]
    rows = _run("--backends", *names, "--steps", "3").measurements()
    losses = {(rows[name].first_loss, rows[name].last_loss) for name in names}
    assert len(losses) == 1


def test_a_failed_backend_has_an_error_row_and_further_backends_run() -> None:
    packages = {
        "megatron_fsdp": "megatron-fsdp 0.6.1",
        "megatron_fsdp_experimental": "megatron-fsdp 0.6.1",
        "deepspeed_zero3": "deepspeed 0.19.8",
    }
    report = _run("--backends", *packages, "lamella", "--steps", "1", "--warmup", "1")
    for backend, package in packages.items():
        failure = report.rows[backend]
        assert isinstance(failure, Failure)
        assert f"Expected the package {package}" in failure.error
    assert isinstance(report.rows["lamella"], Measurement)
    assert not report.is_sound()
    table = [line for line in report.markdown().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1  # the error is in the last column
    assert "| megatron_fsdp | - |" in report.markdown()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--units", "ends", "--microbatches", "2", "--checkpoint", "--compile", "eager"),
        *(
            pytest.param(setting, marks=pytest.mark.slow)
            for setting in (("--units", "ends"), ("--microbatches", "3"), ("--checkpoint",), ("--compile", "eager"))
        ),
    ],
    ids=" ".join,
)
def test_backends_that_train_alike_do_so_with_every_setting(arguments: tuple[str, ...]) -> None:
    if "--compile" in arguments:
        load_compiler()
    report = _run("--backends", "ideal", "lamella", "fsdp2", "ddp", *arguments, "--steps", "2", "--warmup", "1")
    assert report.is_sound(), report.markdown()
    rows = report.measurements()
    assert rows["lamella"].first_loss == rows["fsdp2"].first_loss == rows["ideal"].first_loss
    assert rows["lamella"].last_loss == rows["fsdp2"].last_loss < rows["lamella"].first_loss


@pytest.mark.slow
def test_variants_of_a_backend_are_rows_that_train_alike() -> None:
    variants = [
        "lamella",
        "lamella:keep=1MiB,prefetch=1GiB",
        "lamella:allocator=pool",
        "lamella:placements=ZERO2",
        "lamella:placements=ZERO1",
        "lamella:placements=DDP",
        "lamella:reshard=false",
        "lamella:reductions=2,separate=true",
        "fsdp2:reshard=false" + (",reductions=2,separate=true" if HAS_REDUCTIONS_IN_FLIGHT else ""),
        "lamella",
    ]
    report = _run("--backends", *variants, "--microbatches", "2", "--steps", "2", "--warmup", "1")
    assert report.is_sound(), report.markdown()
    assert list(report.rows) == [*variants[:-1], "lamella (2)"]
    assert len({row.last_loss for row in report.measurements().values()}) == 1
    assert report.ratio("lamella (2)", "fsdp2") is not None


@pytest.mark.slow
def test_replicas_of_shards_train_alike() -> None:
    hsdp = ["lamella:mesh=2x2", "fsdp2:mesh=2x2", "lamella:mesh=2x2,placements=HFSDP+ZERO3"]
    flat_mesh_backends = ["lamella", "fsdp2:reshard=2"]
    report = _run("--backends", *hsdp, *flat_mesh_backends, "--steps", "2", "--warmup", "1", num_ranks=4)
    assert report.is_sound(), report.markdown()
    assert len({report.measurements()[name].last_loss for name in hsdp}) == 1


@FSDP
def test_the_ends_are_units_of_their_own_that_backward_does_not_gather(backend: str) -> None:
    assert _counts(backend) == {"all_gather": 2 * NUM_BLOCKS + 1, "reduce_scatter": NUM_BLOCKS + 1}
    with_ends = replace(TINY, units="ends")
    assert _counts(backend, with_ends) == {"all_gather": 2 * NUM_BLOCKS + 2, "reduce_scatter": NUM_BLOCKS + 2}

    def units() -> list[str]:
        model = backend_of(backend)(with_ends).model
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    blocks = [f"blocks.{i}" for i in range(NUM_BLOCKS)]
    assert run_ranks(units, 2)[0] == ["", "embedding", *blocks, "head"]
    assert with_ends.num_units == len(blocks) + 2
    assert TINY.num_units == len(blocks) + 1


@FSDP
def test_only_the_last_microbatch_reduces_gradients(backend: str) -> None:
    counts = _counts(backend, replace(TINY, num_microbatches=3))
    assert counts == {"all_gather": 3 * (2 * NUM_BLOCKS + 1), "reduce_scatter": NUM_BLOCKS + 1}


def test_microbatches_add_up_to_the_gradient_of_the_mean_loss() -> None:
    def gradients() -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        workload = replace(TINY, num_microbatches=2)
        tokens, labels = workload.batch(8)
        training = backend_of("ideal")(workload)
        loss = training.accumulate(tokens, labels)
        accumulated = [parameter.grad for parameter in training.model.parameters()]
        training.zero_grad()
        expected = next_token_loss(training.model(tokens), labels)
        expected.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss, expected.detach())
        return accumulated, [parameter.grad for parameter in training.model.parameters()]

    accumulated, expected = run_ranks(gradients, 1)[0]
    torch.testing.assert_close(accumulated, expected, rtol=0.05, atol=1e-3)  # bf16 rounds each microbatch's


@FSDP
def test_blocks_compute_again_in_backward_if_told_so(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Block] = []
    compute = Block._compute

    def counted(block: Block, *args: torch.Tensor) -> torch.Tensor:
        calls.append(block)
        return compute(block, *args)

    monkeypatch.setattr(Block, "_compute", counted)

    def num_calls(recomputes: bool) -> int:
        workload = replace(TINY, recomputes=recomputes)
        calls.clear()
        backend_of(backend)(workload).step(*workload.batch(8))
        return len(calls)

    assert run_ranks(lambda: (num_calls(False), num_calls(True)), 2) == [(NUM_BLOCKS, 2 * NUM_BLOCKS)] * 2


@pytest.mark.parametrize(
    "backend", ["lamella", "fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ideal", "ddp"))]
)
def test_blocks_are_compiled_once_for_all_if_told_so(backend: str) -> None:
    def num_graphs() -> int:
        counter = CompileCounter()
        workload = replace(TINY, compiler=cast(str, counter))
        training = backend_of(backend)(workload)
        for _ in range(3):
            training.step(*workload.batch(8))
        graphs: int = counter.frame_count
        return graphs

    load_compiler()
    assert run_ranks(num_graphs, 2) == [1, 1]


@pytest.mark.parametrize(
    ("variant", "num_gathers", "num_reductions"),
    [
        ("lamella:keep=1GiB", NUM_BLOCKS + 1, {"reduce_scatter": NUM_BLOCKS + 1}),
        ("lamella:reshard=false", NUM_BLOCKS + 1, {"reduce_scatter": NUM_BLOCKS + 1}),
        ("fsdp2:reshard=false", NUM_BLOCKS + 1, {"reduce_scatter": NUM_BLOCKS + 1}),
        ("lamella:placements=ZERO2", NUM_BLOCKS + 1, {"reduce_scatter": NUM_BLOCKS + 1}),
        ("lamella:placements=DDP", 0, {"all_reduce": NUM_BLOCKS + 1}),
    ],
)
def test_options_change_the_collectives(variant: str, num_gathers: int, num_reductions: dict[str, int]) -> None:
    assert _counts(variant) == ({"all_gather": num_gathers} if num_gathers else {}) | num_reductions


def test_a_mesh_is_replicas_by_shards() -> None:
    def shapes() -> list[tuple[int, ...]]:
        models = [backend_of(f"{name}:mesh=1x2")(TINY).model for name in ("lamella", "fsdp2")]
        return [cast(DTensor, next(model.parameters())).device_mesh.shape for model in models]

    assert run_ranks(shapes, 2)[0] == [(1, 2), (1, 2)]


def test_phases_are_told_for_every_backend_and_host_time_for_every_unit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(phases, "NUM_HOST_STEPS", 10)  # The fastest tenth is a single step.
    report = _run(
        "--backends", "ideal", "lamella", "fsdp2", "--phases", "--steps", "1", "--warmup", "1", "--out", str(tmp_path)
    )
    assert report.is_sound(), report.markdown()
    for name, row in report.measurements().items():
        assert row.phases is not None
        assert row.host is not None
        assert 0 < row.phases.compute_ms < row.phases.span_ms
        assert (row.phases.collectives_ms > 0) == (name != "ideal")
        assert row.phases.exposed_ms == row.phases.collectives_ms  # On gloo a single thread computes or waits.
        assert row.host.total_us > 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["rows"]["fsdp2"]["phases"].keys() == Phases.__annotations__.keys()
    assert written["rows"]["fsdp2"]["host"].keys() == HostTime.__annotations__.keys()
    assert "| backend | span | compute | collectives | exposed |" in report.markdown()


def test_a_row_without_phases_keeps_the_speed_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(bench, "phases_of", fail)
    monkeypatch.setattr(bench, "host_seconds", fail)
    report = _run("--backends", "lamella", "--phases", "--steps", "1", "--warmup", "1")
    row = report.measurements()["lamella"]
    assert row.tokens_per_s > 0
    assert row.trouble.count("no profiler here") == 2
    assert row.trouble in report.markdown()
    assert not report.is_sound()


def _measurement(first_loss: float, last_loss: float, *, trained: bool = True, leaked_gib: float = 0.0) -> Measurement:
    return Measurement(
        step_s=0.5,
        tokens_per_s=100.0,
        tflops=494.5,
        peak_allocated_gib=2.0,
        peak_reserved_gib=3.0,
        built_gib=1.0,
        at_rest_gib=1.5,
        losses=(first_loss, last_loss),
        trained=trained,
        leaked_gib=leaked_gib,
    )


def test_losses_beyond_their_tolerance_are_flagged_with_both_values() -> None:
    rows = {
        "ideal": _measurement(11.8, 11.8, trained=False),
        "first": _measurement(11.8, 8.0),
        "close": _measurement(11.801, 8.1),
        "wrong": _measurement(11.8, 8.5),
        "other": _measurement(11.9, 8.0),
        "steep": _measurement(11.8, 8.1),
    }
    report = BenchmarkReport(title="t", environment={}, rows=dict(rows))
    assert report.disagreements() == {
        "wrong": "LOSS DISAGREES: expected a mean loss of 9.90000 as first has, got 10.15000",
        "other": "LOSS DISAGREES: expected a first loss of 11.80000 as first has, got 11.90000",
    }
    assert "LOSS DISAGREES" in report.markdown()
    assert not report.is_sound()


def test_backends_that_train_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_ranks_gradient(workload: Workload) -> Training:
        def backward(loss: torch.Tensor) -> None:
            (loss * 0.0 if dist.get_rank() == 1 else loss).backward()  # type: ignore[no-untyped-call]

        return replace(BACKENDS["fsdp2"](workload), backward=backward)

    def with_one_weight_of_eight_as_it_was(workload: Workload) -> Training:
        training = BACKENDS["fsdp2"](workload)
        parameters = list(training.model.parameters())[::8]

        def step() -> None:
            for parameter in parameters:
                parameter.grad = None
            training.optimizer_step()

        return replace(training, optimizer_step=step)

    wrong = {"no gradient": without_a_ranks_gradient, "no update": with_one_weight_of_eight_as_it_was}
    for name, train in wrong.items():
        monkeypatch.setitem(BACKENDS, name, train)
    report = _run("--backends", "fsdp2", "lamella", *wrong, "--steps", "10", num_ranks=4)
    assert list(report.disagreements()) == list(wrong)
    assert not report.is_sound()


def test_a_leak_is_noted() -> None:
    report = BenchmarkReport(title="t", environment={}, rows={"leaky": _measurement(1, 1, leaked_gib=0.5)})
    assert "leaked 0.50 GiB" in report.markdown()


def test_a_ratio_is_of_the_first_row_of_a_backend() -> None:
    speeds = {"fsdp2:mesh=2x2": 50.0, "fsdp2": 80.0, "fsdp2 (2)": 90.0, "lamella:keep=4GiB": 100.0}
    rows = {name: replace(_measurement(1, 1), tokens_per_s=speed) for name, speed in speeds.items()}
    report = BenchmarkReport(title="t", environment={}, rows=dict(rows))
    assert report.ratio("lamella:keep=4GiB", "fsdp2") == 2.0
    assert report.ratio("lamella:keep=4GiB", "ideal") is None
    assert "| lamella:keep=4GiB | 100 | - | 2.00 |" in report.markdown()


def test_several_rows_of_lamella_make_a_curve_of_speed_against_memory(tmp_path: Path) -> None:
    rows = {name: _measurement(1, 1) for name in ("lamella", "fsdp2", "lamella:keep=4GiB")}

    def width(*names: str) -> int:
        BenchmarkReport(title="t", environment={}, rows={name: rows[name] for name in names}).write(tmp_path)
        return int.from_bytes((tmp_path / "report.png").read_bytes()[16:20])

    assert width(*rows) / width("lamella", "fsdp2") == 3 / 2  # a third part of the figure


def test_mfu_is_of_989_teraflops() -> None:
    assert _measurement(1, 1).mfu == 0.5


@pytest.mark.parametrize(("size", "numel"), [("8b", 8_030_261_248), ("1b", 1_498_482_688)])
def test_benchmark_sizes_have_the_number_of_parameters_of_their_names(size: str, numel: int) -> None:
    with torch.device("meta"):
        model = Llama(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


def test_flops_count_matrices_but_the_embedding_and_half_of_the_attention_square() -> None:
    config = SIZES["8b"]
    numel = 8_030_261_248 - config.vocab_size * config.dim - (2 * config.num_layers + 1) * config.dim
    assert num_flops_per_token(config, 4096) == 6 * numel + 12 * config.num_layers * config.dim * 4096 / 2


@pytest.mark.parametrize(
    "arguments",
    [["--tokens", "0"], ["--backends", "nobody"], ["--reduce", "fp8"], ["--microbatches", "0"], ["--units", "all"]],
)
def test_bad_options_are_refused_before_any_work(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("nobody:keep=1", "Expected a backend among ideal, lamella, fsdp2, ddp, .*, got 'nobody'."),
        ("lamella:kep=1", "Expected options of lamella among keep, prefetch, allocator, .*, each once, got 'kep' in"),
        ("lamella:keep=1,keep=2", "each once, got 'keep' in 'lamella:keep=1,keep=2'."),
        ("ddp:keep=1", "Expected no options of ddp, got 'keep' in 'ddp:keep=1'."),
        ("lamella:keep=4GB", "Expected keep= with bytes, as 4GiB, got '4GB' in 'lamella:keep=4GB'."),
        ("lamella:keep", "Expected keep= with bytes, as 4GiB, got '' in"),
        ("lamella:placements=ZERO4", r"Expected placements= with some of DDP, .*, joined by \+, got 'ZERO4' in"),
        ("lamella:allocator=own", "Expected allocator= with one of caching, pool, mempool, got 'own' in"),
        ("fsdp2:mesh=2by2", "Expected mesh= with replicas by shards, as 2x2, got '2by2' in"),
        ("fsdp2:separate=yes", "Expected separate= with true or false, got 'yes' in"),
    ],
)
def test_a_bad_variant_is_refused_with_the_known_names(
    variant: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        backend_of(variant)
    with pytest.raises(SystemExit):
        parse_options(["--backends", "ideal", variant])
    assert "error: Expected" in capsys.readouterr().err
