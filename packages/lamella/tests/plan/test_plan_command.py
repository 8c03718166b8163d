"""`lamella plan` prints a plan, searches, and refuses in one line what it cannot price."""

import json
import re
from pathlib import Path

import pytest
from conftest import TINY_LLAMA

from lamella.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY_LLAMA, "num_hidden_layers": 1}))
    return path


def test_the_command_prints_the_step_and_writes_the_files_of_its_options_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('like = "h200"\ngpus_a_host = 4\nnetwork_gb_s = 25\n')
    arguments = ["plan", str(model), "--ranks", "16", "--batch-size", "16", "--cluster", str(cluster)]
    assert main([*arguments, "--json", "plan.json"]) == 0
    text = capsys.readouterr().out
    assert "step of 16 ranks" in text
    assert "within 141GiB" in text
    assert "all units" in text
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["step"]["exposed_seconds"] <= plan["step"]["communication_seconds"]
    assert plan["cluster"]["network_gb_s"] == 25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.toml", "config.json", "plan.json"]


def test_a_search_puts_the_fastest_that_fits_first(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(model), "--ranks", "16", "--batch-size", "16", "--search", "--json", "-"]) == 0
    plans = json.loads(capsys.readouterr().out)
    seconds = [plan["step"]["seconds"] for plan in plans]
    assert seconds == sorted(seconds)
    assert {"--stage 3", "--stage 1 --replicate 2"} <= {plan["options"] for plan in plans}


def test_the_help_lists_no_option_that_every_plan_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "--cluster NAME|FILE" in text
    assert "--memory" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "h10"], "Expected --cluster to be one of h100, h200, or a file in TOML or JSON, got 'h10'"),
        (["--memory", "8GiB"], "Expected no --memory, got '8GiB'"),
        (["--step-time", "0.1"], "Expected --step-time with --calibrate alone, got '0.1'"),
        (["--calibrate", "no.json", "--search"], "Expected --calibrate without --search, got both"),
        (["--calibrate", "no.json"], "Expected what export_chrome_trace() wrote in 'no.json'"),
        (["--calibrate", "no.json", "--step-time", ""], "Expected --step-time to be a number of at least 0, got ''"),
        (["--calibrate", "no.json", "--step-time", "inf"], "Expected --step-time of more than 0 seconds, and finite"),
        (["--calibrate", "no.json", "--step-time", "x"], "Expected --step-time to be a number of at least 0, got 'x'"),
        (["--learning-rate", "1"], "got '--learning-rate'. Pass --lr."),
        (["--device", "cpu"], "Expected a plan of GPUs, got --device cpu"),
        (
            ["--offload-activations"],
            "Expected a plan of work that has a price, got --offload-activations, whose copies",
        ),
        (["--tensor-parallel", "2"], "got --tensor-parallel, whose sums of hidden states have none"),
        (["--context-parallel", "2"], "got --context-parallel, whose gathers of keys and values have none"),
        (["--experts", "2"], "Expected"),
        (["--attention", "documents"], "got 'documents', whose kernels have no estimate. Pass --attention auto."),
    ],
)
def test_lamella_plan_refuses_unusable_options_in_one_line(
    model: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(model), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("ranks", [[], ["--ranks", "4"]])
def test_a_profile_of_another_number_of_ranks_is_refused(
    model: Path, tmp_path: Path, ranks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [], "distributedInfo": {"rank": 0, "world_size": 2}}))
    assert main(["plan", str(model), *ranks, "--calibrate", str(trace)]) == 2
    number = ranks[-1] if ranks else "8"
    assert f"which had 2 by {str(trace)!r}, got --ranks {number}. Pass --ranks 2." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": 3}, "Expected keys of a cluster"),
        ({"network_gb_s": 0}, "Expected network_gb_s of the cluster to be a number from 1e-06 to 1e+09, got 0."),
        ({"launch_us": -1}, "Expected launch_us of the cluster to be a number from 0 to 1e+09, got -1."),
        ({"network_us": 1e300}, "Expected network_us of the cluster to be a number from 0 to 1e+09, got 1e+300."),
        ({"network_us": float("inf")}, "Expected network_us of the cluster to be a number from 0 to 1e+09, got inf."),
        ({"copy_gb_s": float("nan")}, "Expected copy_gb_s of the cluster to be a number from 1e-06 to 1e+09, got nan"),
        *(
            ({"gpus_a_host": count}, "Expected gpus_a_host of the cluster to be an integer from 1 to 1e+09, got ")
            for count in ("8", 8.0, 4.5, 0.5, 0, True, 10**30)
        ),
        ({"slowdown": 0.5}, "Expected slowdown of the cluster to be a number from 1 to 1e+09, got 0.5."),
        ({"gpu_memory": "much"}, "gpu_memory"),
        ({"gpu_memory": 80}, 'Expected gpu_memory of the cluster to be a text such as "80GiB", got 80.'),
        ({"gpu_memory": "9" * 400}, "Expected gpu_memory to be a size such as 2GiB or 500MiB, got '999"),
        ({"like": "b200"}, "Expected `like` in"),
        ({"like": ["h100"]}, "Expected `like` in"),
        ([1], "which holds no table"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(
    model: Path, tmp_path: Path, settings: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(settings))
    assert main(["plan", str(model), "--cluster", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_nested_too_deeply_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("[" * 100_000)
    assert main(["plan", str(model), "--cluster", str(path)]) == 2
    assert "values that are nested too deeply" in capsys.readouterr().err


def test_a_plan_that_fits_nowhere_names_a_sufficient_memory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "CLUSTER.TOML"
    arguments = ["plan", str(model), "--ranks", "2", "--batch-size", "2", "--search", "--cluster", str(path)]
    path.write_text('gpu_memory = "1MiB"')
    assert main(arguments) == 2
    needed = re.search(r"Expected gpu_memory of at least (0\.\d\dGiB)", capsys.readouterr().err)
    assert needed is not None
    path.write_text(f'gpu_memory = "{needed[1]}"')
    assert main(arguments) == 0
