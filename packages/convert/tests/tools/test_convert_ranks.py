"""A checkpoint of Megatron changes the number of tensor-parallel ranks from one `fsdp_dtensor` to another."""

import re
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lamella_checkpoint.extending import StoredCheckpoint
from lamella_checkpoint.testing import read_all
from lamella_convert import MegatronOptions, convert, diff, open_both, open_checkpoint
from lamella_convert._formats import open as _open

ROWS = {"z": 16, "x": 16, "B": 8, "C": 8, "dt": 8}  # 8 heads of 2 channels, 4 groups of states of 2
WHOLE = dict(zip(ROWS, torch.arange(56.0)[:, None].split(list(ROWS.values())), strict=True))  # type: ignore[no-untyped-call]
ARGS = {"mamba_num_heads": 8, "mamba_head_dim": 2, "mamba_num_groups": 4, "mamba_state_dim": 2}
MIXER, NORM = "decoder.layers.0.mixer", "decoder.final_norm.weight"
MTP = "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight"


def by_rank(num_ranks: int, parts: str = "z x B C dt") -> torch.Tensor:
    """The ranks' parts one after another, each with a share of every section."""
    shares = [[WHOLE[part].chunk(num_ranks)[rank] for part in parts.split()] for rank in range(num_ranks)]
    return torch.cat([share for rank in shares for share in rank])


def save(path: Path, num_ranks: int, *, conv: str = "conv1d_weight", **args: Any) -> Path:
    model = {
        f"module.{MIXER}.in_proj.weight": by_rank(num_ranks),
        f"module.{MIXER}.{conv}": by_rank(num_ranks, "x B C"),
        f"module.{NORM}": torch.ones(2),
        f"module.{MTP}": torch.ones(2, 2),
        "module.decoder.layers.1.layers.0.self_attention.linear_proj.weight": torch.ones(2, 2),
        "module.decoder.layers.1.layers.1.mlp.linear_fc2.weight": torch.ones(2, 2),
    }
    values: dict[str, Any] = {"model": model, "args": Namespace(**ARGS, **args)}
    values |= {"checkpoint_version": 3.0, "iteration": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # There is no group.
        dcp.save(values, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    return path


@pytest.mark.parametrize("parallel_args", [{"tensor_model_parallel_size": 2}, {}], ids=["told", "untold"])
def test_converted_rows_are_ordered_for_the_requested_tensor_parallel_ranks(
    tmp_path: Path, parallel_args: dict[str, Any]
) -> None:
    source = save(tmp_path / "a", 2, **parallel_args)
    num_ranks = 4 if parallel_args else 2  # Files that do not tell are taken for files of as many ranks.
    options = MegatronOptions(tensor_parallel_size=num_ranks)
    convert(source, tmp_path / "b", to="fsdp_dtensor", megatron=options)
    written = open_checkpoint(tmp_path / "b")
    values = read_all(written.raw)
    assert values[f"model.module.{MIXER}.in_proj.weight"].equal(by_rank(num_ranks))
    assert values[f"model.module.{MIXER}.conv1d_weight"].equal(by_rank(num_ranks, "x B C"))
    assert written.recorded_ranks == num_ranks  # Readers take the rows apart by this number.


def test_open_both_reads_the_metadata_of_each_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Path] = []

    class Counted(StoredCheckpoint):
        def __init__(self, directory: Path, **options: Any) -> None:
            paths.append(directory)
            super().__init__(directory, **options)

    source = save(tmp_path / "a", 2, tensor_model_parallel_size=2)
    monkeypatch.setattr(_open, "StoredCheckpoint", Counted)
    assert not diff(*open_both(source, source, tensor_parallel_size=4))
    assert paths == [source, source]


@pytest.mark.parametrize("conv", ["conv1d_weight", "conv1d.weight"])
def test_without_a_number_names_and_rows_stay(tmp_path: Path, conv: str) -> None:
    source = save(tmp_path / "a", 2, conv=conv, tensor_model_parallel_size=2)
    convert(source, tmp_path / "b", to="fsdp_dtensor")
    assert not diff(open_checkpoint(source).raw, open_checkpoint(tmp_path / "b").raw)


def test_checkpoints_of_different_ranks_are_compared_each_by_its_own(tmp_path: Path) -> None:
    paths = [save(tmp_path / str(num), num, tensor_model_parallel_size=num) for num in (2, 4)]
    assert [difference.name for difference in diff(*open_both(*paths, tensor_parallel_size=2)).differences] == ["args"]


def test_a_tensor_parallel_size_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "a", 2, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"ranks that wrote .* \(2, as its files tell\), got 4\. Leave it out"):
        convert(source, tmp_path / "b", to="torch", megatron=MegatronOptions(tensor_parallel_size=4))


def test_parts_of_groups_are_not_written(tmp_path: Path) -> None:
    source = save(tmp_path / "a", 2, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=re.escape("the checkpoint's `mamba_num_groups` (4), got 8")):
        convert(source, tmp_path / "b", to="fsdp_dtensor", megatron=MegatronOptions(tensor_parallel_size=8))


@pytest.mark.parametrize("name", ["tensor_parallel_size", "padded_vocabulary"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Expected `{name}` of at least 1, or None, got 0"):
        MegatronOptions(**{name: 0})  # type: ignore[arg-type]
