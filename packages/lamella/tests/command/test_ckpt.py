"""`lamella ckpt`: every format listed, compared, converted and checked, and asked wrongly."""

import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm

import lamella_convert
from lamella._record.progress import ByteBar
from lamella.cli import main
from lamella_checkpoint import CheckpointDirectory, save
from lamella_convert import keep_published

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `lamella ckpt`; check the exit code and an empty stderr; return the printed text."""

    def run(*argv: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["ckpt", *map(str, argv)]) == code, capsys.readouterr()
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `lamella ckpt`, and return the line of the refusal."""

    def refusal(*argv: object, code: int = 2) -> str:
        capsys.readouterr()
        assert main(["ckpt", *map(str, argv)]) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("lamella: error: ") and printed.err.count("\n") == 1
        return printed.err

    return refusal


def published(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """A Hugging Face folder."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "tiny", **config}))
    return path


def dcp_save(path: Path, values: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A warning of no process group.
        dcp.save(values, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    return path


WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return published(tmp_path / "tiny", {"layer.weight": WEIGHT, "layer.bias": torch.ones(3)})


@pytest.fixture
def everywhere(tmp_path: Path, tiny: Path) -> dict[str, Path]:
    """Small checkpoints, by format."""
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    save(tmp_path / "own", model=layer, optimizer=optimizer, extra={"step": 7})
    torch.save({"model": layer.state_dict(), "epoch": 2}, tmp_path / "file.pt")
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    dcp_save(tmp_path / "fsdp_dtensor", {"model": {f"module.{name}": WEIGHT}, "checkpoint_version": 3.0})
    dcp_save(tmp_path / "torch_dist", {name: WEIGHT})
    (tmp_path / "torch_dist" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return {
        "lamella": tmp_path / "own",
        "dcp": dcp_save(tmp_path / "dcp", {"model": layer.state_dict()}),
        "torch": tmp_path / "file.pt",
        "safetensors": tiny,
        "fsdp_dtensor": tmp_path / "fsdp_dtensor",
        "torch_dist": tmp_path / "torch_dist",
    }


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_every_format_is_listed_and_is_whole(run: Run, everywhere: dict[str, Path]) -> None:
    for kind, path in everywhere.items():
        lines = run("inspect", path).splitlines()
        assert lines[0].startswith(f"{path}: {kind}, ")
        assert any(line.strip().endswith("float32 [3, 4], 48 B") for line in lines)
        assert json.loads(run("inspect", path, "--json", "-"))["format"] == kind
        assert run("verify", path).splitlines()[-1].startswith(f"{path}: whole, ")
        assert run("diff", path, path).startswith("0 differences, ")


def test_a_listing_is_summed_up_and_written(run: Run, everywhere: dict[str, Path], tmp_path: Path) -> None:
    text = run("inspect", everywhere["lamella"], "--depth", 1, "--json", tmp_path / "list.json")
    assert "  model  2 tensors, 60 B" in text.splitlines() and "weight" not in text
    entries = json.loads((tmp_path / "list.json").read_text())["entries"]
    assert {entry["name"]: entry["shape"] for entry in entries}["model.weight"] == [3, 4]


# -- diff -------------------------------------------------------------------------------------------------------------


def test_differences_are_told_and_leave_with_1(run: Run, tiny: Path, tmp_path: Path) -> None:
    changed = WEIGHT.clone()
    changed[1, 2] += 0.5
    other = published(tmp_path / "other", {"layer.weight": changed, "layer.other": torch.ones(3)})
    lines = run("diff", tiny, other, code=1).splitlines()
    assert "model.layer.weight: 1 of 12 values, first at [1, 2]: 6.0 in a, 6.5 in b" in lines
    assert lines[-1] == f"3 differences, 0 names are equal: {tiny} (a), {other} (b)"
    assert run("diff", tiny, other, "--limit", 1, code=1).splitlines()[1] == "and 2 more"
    for option in (["--names-only"], ["--atol", "0.5"], ["--rtol", "0.1"]):
        lines = run("diff", tiny, other, *option, code=1).splitlines()
        assert lines[-1].startswith("2 differences, 1 names are equal")
    values = json.loads(run("diff", tiny, other, "--json", "-", code=1))
    assert [difference["name"] for difference in values["differences"]][-1] == "model.layer.other"


# -- convert ----------------------------------------------------------------------------------------------------------


def test_ckpt_convert_takes_a_model_through_every_format_and_back(run: Run, tiny: Path, tmp_path: Path) -> None:
    lines = run("convert", tiny, tmp_path / "native", "--to", "dcp").splitlines()
    assert lines == [f"{tmp_path / 'native'}: dcp, 2 tensors of 60 bytes, from {tiny}", "beside them: config.json"]
    run("convert", tmp_path / "native", tmp_path / "model.pt", "--to", "torch")
    run("convert", tmp_path / "model.pt", tmp_path / "hf", "--to", "hf", "--config", tiny)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert (tmp_path / "hf" / "config.json").read_text() == (tiny / "config.json").read_text()
    for path in (tmp_path / "native", tmp_path / "model.pt", tmp_path / "hf"):
        assert run("diff", tiny, path).startswith("0 differences, 2 names are equal")


def test_ckpt_convert_lists_optimizer_state_that_safetensors_leave_out(
    run: Run, everywhere: dict[str, Path], tmp_path: Path
) -> None:
    output = run("convert", everywhere["lamella"], tmp_path / "hf", "--to", "hf")
    assert "left out: " in output and "optimizer.param_groups.weight.lr" in output


def test_weights_are_cast_and_cut_into_files(run: Run, tiny: Path, tmp_path: Path) -> None:
    run("convert", tiny, tmp_path / "hf", "--to", "hf", "--dtype", "bf16", "--max-shard-size", "24B")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert torch.equal(tensors["layer.weight"], WEIGHT.bfloat16())


def test_matrices_become_float8_and_numbers_again(run: Run, tmp_path: Path) -> None:
    weight = torch.randn(128, 256)
    source = published(tmp_path / "a", {"layer.weight": weight})
    run("convert", source, tmp_path / "b", "--to", "hf", "--float8")
    assert load_file(tmp_path / "b" / "model.safetensors")["layer.weight"].dtype == torch.float8_e4m3fn
    run("convert", tmp_path / "b", tmp_path / "c", "--to", "hf", "--no-float8", "--dtype", "fp32")
    assert set(load_file(tmp_path / "c" / "model.safetensors")) == {"layer.weight"}
    assert run("diff", source, tmp_path / "b", "--rtol", 0.07, "--atol", 0.01, code=1).startswith(
        "model.layer.weight: dtype: torch.float32 in a, torch.bfloat16 in b\n1 differences"
    )
    run("diff", tmp_path / "b", tmp_path / "b")


def test_a_checkpoint_gives_way_when_forced_and_nothing_else_does(
    run: Run, refusal: Run, tiny: Path, tmp_path: Path
) -> None:
    other = published(tmp_path / "other", {"x": torch.ones(2)})
    runs = published(tmp_path / "runs", {"x": torch.ones(2)})
    run("convert", other, runs / "to", "--to", "dcp")
    for to, target in (("dcp", tmp_path / "to"), ("hf", tmp_path / "hf"), ("torch", tmp_path / "to.pt")):
        run("convert", other, target, "--to", to)
        message = refusal("convert", tiny, target, "--to", to)
        assert str(target) in message and "With --force a checkpoint there is replaced." in message
        assert run("diff", other, target).startswith("0 differences")
        run("convert", tiny, target, "--to", to, "--force")
        assert run("diff", tiny, target).startswith("0 differences")
    for target, problem in (
        (runs, "folders: to."),
        (tmp_path, "got the source"),
        (tiny, "got the source"),
        (tiny.parent / "to.pt", "got a file"),
        (tiny / "config.json", "got a file"),
    ):
        assert problem in refusal("convert", tiny, target, "--to", "hf", "--force")
    assert "--force" not in refusal("convert", tiny, tmp_path / "to.pt" / "below", "--to", "hf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert "['notes.txt']" in refusal("convert", tiny, tmp_path / "mine", "--to", "hf", "--force")
    assert (tmp_path / "mine" / "notes.txt").exists() and (tiny / "config.json").exists()


# -- Qwen3.5, to Megatron and back ------------------------------------------------------------------------------------


def publish(kind: Any, folder: Path, dtype: torch.dtype) -> Path:
    """A published Qwen3.5, with the layer that predicts further tokens."""
    from lamella_testing.qwen import make_model, make_mtp

    make_model(kind, vocab_size=300, spread=0.05).to(dtype).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | make_mtp(weights), folder / "model.safetensors", {"format": "pt"})
    return folder


BRIDGE, RELEASE = ("bridge", "transformer_layer"), ("release-0.19", "mtp_model_layer")
PAIRS = [("dense", BRIDGE), ("moe", RELEASE), ("vision", RELEASE), ("vision-moe", BRIDGE)]
FURTHER_PAIRS = [("dense", RELEASE), ("moe", BRIDGE), ("vision", BRIDGE), ("vision-moe", RELEASE)]


@pytest.mark.parametrize(
    ("kind", "dialect_and_mtp_layer"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in FURTHER_PAIRS)],
)
@pytest.mark.usefixtures("family")
def test_a_qwen_goes_to_megatron_and_back_bit_for_bit(
    run: Run, tmp_path: Path, kind: str, dialect_and_mtp_layer: tuple[str, str]
) -> None:
    dialect, mtp_layer = dialect_and_mtp_layer
    qwen = publish(kind, tmp_path / "qwen", torch.bfloat16)
    native, megatron, back = (tmp_path / name for name in ("native", "megatron", "back"))
    run("convert", qwen, native, "--to", "dcp", "--dtype", "fp32")
    run("convert", native, megatron, "--to", "fsdp_dtensor", "--dialect", dialect, "--mtp-layer", mtp_layer, "--tp", 2)
    assert f"mtp.layers.0.{mtp_layer}.self_attention.linear_proj.weight" in run("inspect", megatron, "--json", "-")
    run("convert", megatron, back, "--to", "hf", "--tp", 2, "--dtype", "bf16")
    before, after = (load_file(path / "model.safetensors") for path in (qwen, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run("diff", qwen, back).startswith("0 differences")
    assert run("diff", native, megatron, "--tp", 2).startswith("0 differences")
    assert run("diff", megatron, megatron, "--tp", 2).startswith("0 differences")
    assert run("inspect", megatron).startswith(f"{megatron}: fsdp_dtensor, ")
    assert run("verify", megatron).splitlines()[-1].startswith(f"{megatron}: whole, ")
    # A change on one side is seen through the translation.
    tensors = load_file(qwen / "model.safetensors")
    [norm] = [name for name in tensors if name.endswith("layers.0.linear_attn.norm.weight")]
    tensors[norm][1] += 1
    save_file(tensors, qwen / "model.safetensors", {"format": "pt"})
    lines = run("diff", native, qwen, "--names-only", "--limit", 1000, code=1).splitlines()
    assert all(": dtype: " in line for line in lines[:-1])
    lines = run("diff", qwen, megatron, "--tp", 2, "--limit", 1000, code=1).splitlines()
    [line] = [line for line in lines if "values" in line]
    assert line.startswith(f"model.{norm}: 1 of 6 values, first at [1]: ")


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("kind", ["dense", "vision-moe"])
def test_trained_and_untrained_weights_of_a_run_go_to_megatron_and_back(
    run: Run, refusal: Run, tmp_path: Path, kind: str
) -> None:
    """The text model is trained; Megatron gets the whole model, and the whole is published again unchanged."""
    from transformers import AutoModelForCausalLM

    qwen, model_folder = publish(kind, tmp_path / "qwen", torch.float32), tmp_path / "kept"
    before = load_file(qwen / "model.safetensors")
    untrained = [name for name in before if name.startswith(("mtp.", "model.visual."))]
    model_folder.mkdir()
    keep_published(qwen, model_folder, untrained=untrained, dtype=torch.float32)
    text = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    optimizer = torch.optim.AdamW(text.parameters(), lr=1e-3)
    for parameter in text.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    norm = "model.layers.0.linear_attn.norm.weight"
    with torch.no_grad():
        text.get_parameter(norm)[0] = 1 / 3  # Around zero the number loses its last bit.
    trained, megatron, back, new = (tmp_path / name for name in ("trained", "megatron", "back", "new"))
    save(trained, model=text, optimizer=optimizer)

    output = run("convert", trained, megatron, "--to", "fsdp_dtensor", "--tp", 2, "--config", model_folder)
    assert "as they were published, not trained: " in output and "left out" not in output
    [line] = [
        line for line in output.splitlines() if line.startswith("lose bits around zero, and are kept beside for ")
    ]
    assert norm.removeprefix("model.") in line and line.count("linear_attn.norm.weight") == 1
    run("convert", megatron, back, "--to", "dcp", "--tp", 2)
    assert run("diff", trained, back, "--config", model_folder).startswith("0 differences")
    lines = run("diff", trained, back, "--limit", 1000, code=1).splitlines()
    assert len(lines) == len(untrained) + 1 and all("only in b" in line for line in lines[:-1]), lines
    output = run("convert", back, new, "--to", "hf")
    assert "published" not in output  # The checkpoint has all by now.
    straight = run("convert", trained, tmp_path / "straight", "--to", "hf", "--config", model_folder)
    assert f"as they were published, not trained: {untrained[0]}, " in straight
    after, other = (load_file(path / "model.safetensors") for path in (new, tmp_path / "straight"))
    assert after.keys() == other.keys() == before.keys()
    assert all(torch.equal(after[name], other[name]) for name in before)
    assert all(torch.equal(after[name], before[name]) is (name in untrained) for name in before)
    # For a folder without the kept values, the missing values are named.
    output = run("convert", trained, tmp_path / "part", "--to", "hf", "--config", qwen)
    assert f"published before, and absent now: {untrained[0]}, " in output
    file = model_folder / "lamella_untrained.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert str(file) in refusal("convert", trained, tmp_path / "no", "--to", "hf", "--config", model_folder, code=1)
    assert "--padded-vocab" in refusal("convert", trained, tmp_path / "no", "--to", "hf", "--padded-vocab", "none")
    output = refusal("convert", trained, tmp_path / "no", "--to", "hf", "--padded-vocab", 320)
    assert "Expected --padded-vocab with --to fsdp_dtensor only, got --to hf" in output


@pytest.mark.parametrize("kind", [kind for kind, _ in PAIRS])
@pytest.mark.usefixtures("family")
def test_missing_tp_and_config_for_megatron_are_asked_for_by_option(
    run: Run, refusal: Run, tmp_path: Path, kind: str
) -> None:
    qwen = publish(kind, tmp_path / "qwen", torch.bfloat16)
    megatron, destination = tmp_path / "megatron", tmp_path / "there"
    message = refusal("convert", qwen, megatron, "--to", "fsdp_dtensor")
    assert "Expected --tp, " in message and "in_proj.weight.query" in message
    assert "Expected a tensor_parallel_size that divides the 4 key heads" in refusal(
        "convert", qwen, megatron, "--to", "fsdp_dtensor", "--tp", 8
    )
    run("convert", qwen, megatron, "--to", "fsdp_dtensor", "--tp", 2)
    # From then on the checkpoint tells the number itself.
    assert "(2, as its files tell), got 4. Leave it out" in refusal(
        "convert", megatron, destination, "--to", "hf", "--tp", 4
    )
    assert run("diff", qwen, megatron).startswith("0 differences")
    (megatron / "hf" / "config.json").unlink()
    assert "Expected --config, " in refusal("convert", megatron, destination, "--to", "hf")
    run("convert", megatron, destination, "--to", "hf", "--config", qwen / "config.json")
    assert run("diff", qwen, destination).startswith("0 differences")
    assert run("diff", qwen, megatron, "--tp", 2).startswith("0 differences")  # The other side's config serves both.


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "convert"])
def test_paths_without_a_checkpoint_are_named(refusal: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "text").write_text("no checkpoint")
    arguments: dict[str, list[object]] = {"diff": [tmp_path / "empty"], "convert": [tmp_path / "to", "--to", "hf"]}
    more = arguments.get(command, [])
    for name, problem in (
        ("absent", "Expected a checkpoint, got nothing"),
        ("empty", "got an empty directory."),
        ("other", "got ['notes.txt'] and no .metadata"),
        ("text", "a file that is neither torch.save's nor safetensors"),
    ):
        message = refusal(command, tmp_path / name, *([tmp_path / name] if command == "diff" else more))
        assert problem in message and repr(str(tmp_path / name)) in message
    assert not (tmp_path / "to").exists()


def test_a_damaged_file_is_named_by_every_command_and_leaves_with_1(
    run: Run, refusal: Run, everywhere: dict[str, Path], tmp_path: Path
) -> None:
    file = everywhere["lamella"] / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.find(b"data.pkl") + 200] ^= 1
    file.write_bytes(content)
    assert str(file) in refusal("diff", everywhere["lamella"], everywhere["lamella"], code=1)
    assert str(file) in refusal("convert", everywhere["lamella"], tmp_path / "to", "--to", "hf", code=1)
    lines = run("verify", everywhere["lamella"], code=1).splitlines()
    assert lines[0].startswith(f"{file}: ") and "damaged, " in lines[-1]
    assert json.loads(run("verify", everywhere["lamella"], "--json", "-", code=1))["whole"] is False
    os.truncate(file, 100)
    assert str(file) in refusal("inspect", everywhere["lamella"], code=1)
    file = everywhere["safetensors"] / "model.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    for argv in (["inspect"], ["convert", tmp_path / "to", "--to", "dcp"], ["diff", everywhere["dcp"]]):
        assert str(file) in refusal(argv[0], everywhere["safetensors"], *argv[1:], code=1)
    assert not (tmp_path / "to").exists()


class Odd:
    """A type outside all allow-lists."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


def test_a_pickled_type_is_named_and_made_when_trusted(run: Run, refusal: Run, tmp_path: Path) -> None:
    file = tmp_path / "odd.pt"
    torch.save(Odd(), file)
    for argv in (["inspect", file], ["diff", file, file], ["convert", file, tmp_path / "to", "--to", "hf"]):
        message = refusal(*argv)
        assert "test_ckpt.Odd" in message and "--trust" in message and str(file) in message
    directory = dcp_save(tmp_path / "odd", {"model": {"x": WEIGHT}})
    metadata = dcp.FileSystemReader(directory).read_metadata()  # type: ignore[attr-defined]
    metadata.planner_data["odd"] = Odd()
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    for argv in (["inspect", directory], ["verify", directory], ["diff", directory, directory]):
        assert "test_ckpt.Odd" in refusal(*argv)
        run(*argv, "--trust")
    assert "test_ckpt.Odd" in refusal("convert", directory, tmp_path / "to", "--to", "hf")
    run("convert", directory, tmp_path / "to", "--to", "hf", "--trust")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--to", "hff"], "Expected --to to be one of dcp, hf, torch, fsdp_dtensor, got 'hff'. Did you mean 'hf'?"),
        ([], "The following arguments are required: --to"),
        (["--to", "hf", "--dtype", "int4"], "Expected --dtype to be one of bf16, fp16, fp32, fp64, got 'int4'."),
        (["--to", "fsdp_dtensor", "--dialect", "x"], "Expected --dialect to be one of release-0.19, bridge, got 'x'."),
        (["--to", "fsdp_dtensor", "--mtp-layer", "x"], "Expected --mtp-layer to be one of mtp_model_layer, "),
        (["--to", "fsdp_dtensor", "--tp", "two"], "Expected --tp to be an integer of at least 1, got 'two'."),
        (["--to", "fsdp_dtensor", "--tp", "0"], "Expected --tp to be an integer of at least 1, got '0'."),
        (["--to", "hf", "--max-shard-size", "big"], "Expected --max-shard-size to be a size such as 2GiB"),
        (["--to", "hf", "--max-shard-size", "9" * 400], "Expected --max-shard-size to be a size such as 2GiB"),
        (["--to", "hf", "--max-shard-size", "0"], "Expected --max-shard-size of at least 1 byte, got '0'. Pass a size"),
        (["--to", "hf", "--config", "absent"], "Expected a config.json as --config, or a folder that has one"),
        (["--to", "dcp", "--float8"], "Expected --float8 with --to hf only, got --to dcp. Leave --float8 out."),
        (["--to", "hf", "--dialect", "bridge"], "Expected --dialect with --to fsdp_dtensor only, got --to hf. Leave"),
        (["--to", "hf", "--padded-vocab", "64"], "Expected --padded-vocab with --to fsdp_dtensor only, got --to hf."),
        (["--too", "hf", "--to", "hf"], "Expected an option of `lamella ckpt convert`, got '--too'."),
        (["--to", "fsdp_dtensor"], "Expected a model type whose rules a package has, got 'tiny'. Known: "),
    ],
)
def test_bad_options_are_one_line(refusal: Run, tiny: Path, tmp_path: Path, argv: list[str], expected: str) -> None:
    message = refusal("convert", tiny, tmp_path / "to", *argv)
    assert expected in message
    assert ("uv pip install './packages/lamella[qwen]'" in message) is ("model type" in expected)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"model_type": ', "expecting value at line 1, column 16."),
        ("[1]", "a list."),
    ],
)
def test_a_config_that_is_no_json_object_is_refused_by_its_path(
    refusal: Run, tiny: Path, tmp_path: Path, content: str, expected: str
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(content, encoding="utf-8")
    for command, other in (("convert", ["--to", "hf"]), ("diff", [])):
        message = refusal(command, tiny, tmp_path / "to" if other else tiny, *other, "--config", file)
        assert f"Expected a JSON object in {str(file)!r} as --config, got {expected}" in message


def test_the_other_commands_options_are_checked_too(refusal: Run, tiny: Path, tmp_path: Path) -> None:
    assert "Expected --depth to be an integer of at least 0, got '-1'" in refusal("inspect", tiny, "--depth=-1")
    assert "Expected --rtol to be a number of at least 0, got 'nan'" in refusal("diff", tiny, tiny, "--rtol", "nan")
    assert "Did you mean '--names-only'?" in refusal("diff", tiny, tiny, "--name-only")
    assert "Did you mean 'verify'?" in refusal("verfy", tiny)
    assert main(["ckpt", "inspect", str(tiny), "--json", str(tmp_path / "absent" / "x.json")]) == 2


def test_the_folder_of_a_run_is_refused_with_its_newest_checkpoint(refusal: Run, tmp_path: Path) -> None:
    for step in (3, 20):
        CheckpointDirectory(tmp_path / "checkpoints").save(step, model=nn.Linear(2, 2))
    newest = repr(str(tmp_path / "checkpoints" / "step_00000020"))
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert f"The newest checkpoint in it is {newest}." in refusal("inspect", folder)


def test_ckpt_inspect_cuts_long_listings_on_terminals_only(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(20))
    path = save(tmp_path / "long", model=model)
    everything = run("inspect", path)
    assert everything.count("weight") == 40
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = run("inspect", path).splitlines()
    assert len(shown) <= 61 and "weight" not in shown[-2]
    assert shown[-1] == f"{len(everything.splitlines())} lines in all; these are --depth 2"
    assert run("inspect", path, "--depth", "9") == everything


def test_weights_without_a_configuration_say_how_to_take_one_along(run: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "alone", model=nn.Linear(2, 2))
    assert "beside them: nothing; --config FOLDER takes" in run("convert", path, tmp_path / "hf", "--to", "hf")


def test_a_file_that_may_not_be_written_is_named(refusal: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(lamella_convert, "convert", refuse)
    assert "got Permission denied: '/somewhere'." in refusal("convert", tiny, "/somewhere", "--to", "hf")


# -- around -----------------------------------------------------------------------------------------------------------


def test_characters_that_a_terminal_cannot_encode_are_shown_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"é\x1b[2J\n": torch.ones(2)}, tmp_path / "a.pt")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["ckpt", "inspect", str(tmp_path / "a.pt")]) == 0
    assert rb"\xe9\x1b[2J\n  float32 [2], 8 B" in shown.getvalue()


def test_a_damaged_file_is_told_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a\n\x1b[2J.pt"
    file.write_bytes(b"\x80\x02garbage")
    assert main(["ckpt", "inspect", str(file)]) == 1
    message = capsys.readouterr().err
    assert message.endswith("\n") and message[:-1].isprintable() and r"a\n\x1b[2J.pt" in message


def test_an_interrupted_conversion_leaves_with_130_and_nothing_behind(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteBar, "to", interrupt)
    before = set(tmp_path.iterdir())
    assert main(["ckpt", "convert", str(tiny), str(tmp_path / "to"), "--to", "hf"]) == 130
    assert capsys.readouterr() == ("", "lamella: interrupted.\n")
    assert set(tmp_path.iterdir()) == before


def test_progress_is_drawn_on_a_terminal_and_counts_to_the_end(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[float, float | None]] = []

    class Told(tqdm):  # type: ignore[type-arg]
        def close(self) -> None:
            if not self.disable:
                drawn.append((self.n, self.total))
            super().close()

    monkeypatch.setattr("lamella._record.progress.tqdm", Told)
    assert main(["ckpt", "convert", str(tiny), str(tmp_path / "a"), "--to", "dcp"]) == 0
    assert capsys.readouterr().err == "" and not drawn
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for argv in (["convert", "--to", "dcp", str(tiny), str(tmp_path / "b")], ["diff", str(tiny), str(tmp_path / "b")]):
        drawn.clear()
        assert main(["ckpt", *argv]) == 0
        assert drawn == [(60, 60)] and capsys.readouterr().err != ""


ALONE = """
import sys
import torch
from lamella.cli import main

assert "transformers" not in sys.modules and "matplotlib" not in sys.modules
source, target = sys.argv[1:]
for argv in (
    ["convert", source, target, "--to", "dcp"],
    ["inspect", target],
    ["diff", source, target],
    ["verify", target],
):
    assert main(["ckpt", *argv]) == 0
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert "transformers" not in sys.modules and "matplotlib" not in sys.modules
"""


def test_no_accelerator_no_group_and_no_model_library_are_touched(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", ALONE, str(tiny), str(tmp_path / "to")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_a_reader_that_leaves_early_is_no_error(tiny: Path) -> None:
    command = f"{sys.executable} -P -m lamella ckpt inspect {tiny} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
