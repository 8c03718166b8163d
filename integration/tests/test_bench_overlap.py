"""The benchmark of overlapped all-to-alls: its table, the share hidden in a trace, and a run on CPU ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lamella_integration.bench_overlap import main, shares, table
from lamella_integration.overlap_steps import MODES, logits_in_turn, no_all_to_alls

SIZE = "64x32, 2 layers, 4 experts of 64"


def _row(mode: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"size": SIZE, "mode": mode, "ms": ms, "gib": 1.5, "losses": [5.0, 4.0], "norm": 2.0, **more}


def test_modes_compare_with_the_plain_mode_of_their_engine() -> None:
    ideal = {"size": SIZE, "mode": "ideal", "ms": 80.0, "gib": 1.5}
    rows = [
        {"size": SIZE, "mode": "lamella", "error": "rank 0: a run before this one"},
        _row("lamella", 100.0),
        _row("lamella, overlapped", 85.0, losses=[5.0, 4.5], norm=2.02, hidden=[0.75, 0.5], idle=[0.1, 0.2]),
        _row("lamella, overlapped, delayed", 84.0, trouble="no trace: rank 1: TraceError: Expected GPU kernels"),
        ideal,
        _row("megatron-core", 90.0, norm=None),
        _row("megatron-core, its plan", 81.0, norm=None),
        {"size": SIZE, "mode": "megatron-core, its plan, delayed", "error": "rank 1: Error: a|b\nmore"},
    ]
    cells = [line.removeprefix(f"| {SIZE} | ").removesuffix(" |") for line in table(rows).splitlines()[2:]]
    trouble = "no trace: rank 1: TraceError: Expected GPU kernels"
    rank_shares = "75.0 % / 50.0 % | 10.0 % / 20.0 %"
    assert cells == [
        "lamella | 100.00 |  | 20.0 % |  |  |  | 1.50 | 4.0000 |  | ",
        f"lamella, overlapped | 85.00 | 15.0 % |  | 75.0 % | {rank_shares} | 1.50 | 4.5000 | 0.5 | 0.01",
        f"lamella, overlapped, delayed | 84.00 | 16.0 % |  | 80.0 % | {trouble} |  | 1.50 | 4.0000 | 0 | 0",
        "ideal | 80.00 |  |  |  |  |  | 1.50 |  |  | ",
        "megatron-core | 90.00 |  |  |  |  |  | 1.50 | 4.0000 |  | ",
        "megatron-core, its plan | 81.00 | 10.0 % |  |  |  |  | 1.50 | 4.0000 | 0 | ",
        "megatron-core, its plan, delayed | rank 1: Error: a/b |  |  |  |  |  |  |  |  | ",
    ]


def _event(category: str, name: str, start: int, end: int, **args: int) -> dict[str, Any]:
    place = {"pid": 1, "tid": args.get("stream", 1)}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args, **place}


def _kernel(name: str, start: int, end: int, launched: int, stream: int) -> list[dict[str, Any]]:
    launch = _event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=start)
    return [_event("kernel", name, start, end, correlation=start, stream=stream), launch]


def test_an_all_to_all_hides_beside_compute_of_another_stream() -> None:
    send = "ncclDevKernel_SendRecv"
    events = [
        _event("user_annotation", "schedule::dispatch forward (layer 0)", 0, 10),
        *_kernel(send, 20, 60, 5, stream=13),  # 30 of 40 beside the matmul
        *_kernel("nvjet_tst", 30, 70, 12, stream=7),
        _event("user_annotation", "schedule::combine backward (layer 0)", 20, 30),
        *_kernel(send, 80, 120, 25, stream=13),  # alone
        *_kernel("ncclDevKernel_ReduceScatter", 90, 110, 35, stream=17),  # no compute, and no all-to-all
    ]
    fractions = shares({"traceEvents": events})
    assert fractions == {"hidden": pytest.approx(30 / 80), "idle": pytest.approx(10 / 100)}


@pytest.mark.parametrize(("num_in", "num_out"), [(2, 5), (5, 2), (3, 3), (0, 2), (2, 0)])
def test_without_an_all_to_all_the_output_is_of_the_source(num_in: int, num_out: int) -> None:
    source, output = torch.arange(1.0, num_in + 1).expand(2, -1).T.clone(), torch.full((num_out, 2), -1.0)
    with no_all_to_alls():
        dist.all_to_all_single(output, source, output_split_sizes=[num_out], input_split_sizes=[num_in])
    expected = [i % num_in + 1.0 if num_in else 0.0 for i in range(num_out)]
    assert output.tolist() == [[value, value] for value in expected]
    assert (output.data_ptr() == source.data_ptr()) == (num_in == num_out)


def test_experts_in_turn_have_as_many_tokens_each_and_logits_their_gradient() -> None:
    logits = torch.randn(3, 2, 4, requires_grad=True)  # (length, batch, experts)
    chosen = logits_in_turn(logits, top_k=2)
    assert chosen.topk(2).indices.tolist() == 3 * [[[0, 1], [2, 3]]]
    gradient = torch.arange(24.0).view(3, 2, 4)
    [logits_gradient] = torch.autograd.grad(chosen, logits, gradient)
    assert torch.equal(logits_gradient, gradient)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "64"], "Expected --sizes of HIDDENxTOKENS, with tokens divisible by --rows 1, got '64'."),
        (["--sizes", "64x33", "--rows", "2"], "with tokens divisible by --rows 2, got '64x33'."),
        (["--pattern", "[*E]", "--modes", "megatron-core, its plan"], "which megatron-core has no plan for."),
    ],
)
def test_unusable_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [None, "[*E][*E]"])
def test_two_cpu_ranks_take_steps_in_all_modes(pattern: str | None, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "lamella_integration.bench_overlap", "--device", "cpu", "--out", str(tmp_path / "rows.jsonl")]
    small = ["--layers", "2", "--experts", "4", "--steps", "1", "--sizes", "64x32", "--trace", str(tmp_path / "traces")]
    model = ["--pattern", pattern] if pattern else []
    done = subprocess.run([*torchrun, *program, *small, *model], check=True, timeout=120, capture_output=True)
    rows = {row["mode"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert [name for name in MODES if pattern is None or "plan" not in name] == list(rows)
    assert [row["error"] for row in rows.values() if "error" in row] == []
    plain, overlapped = rows["lamella"], rows["lamella, overlapped"]
    assert (overlapped["losses"], overlapped["norm"]) == (plain["losses"], pytest.approx(plain["norm"], rel=1e-12))
    assert rows["megatron-core"]["losses"] == pytest.approx(plain["losses"], abs=1e-3)
    assert "losses" not in rows["ideal"]
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    modes = ("lamella-overlapped-64x32", "lamella-overlapped-delayed-64x32")
    assert names == [f"{mode}-rank{rank}.json.gz" for mode in modes for rank in (0, 1)]
    assert b"| lamella, overlapped, delayed |" in done.stdout
