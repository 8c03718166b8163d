"""`save_checkpoint` and `load_checkpoint` of `megatron.training` over lamella's shards: resumed as if never stopped."""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_lm
import pytest
import torch
from megatron_lm import SHARDED
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

import lamella_megatron
from lamella_convert import convert
from lamella_files import Source, rename
from lamella_megatron._checkpoint.global_optimizer import GlobalOptimizer
from lamella_megatron._checkpoint.global_tensors import GlobalModel
from lamella_testing import RankFailure, run_ranks

History = list[tuple[float, float]]
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


@pytest.fixture(scope="module", autouse=True)
def programs(on_cpu: None) -> Iterator[None]:
    with megatron_lm.programs_on_cpu():
        yield


def _train_and_save(directory: Path, *arguments: str) -> History:
    """Six steps, saved after the third; the losses of the last three."""
    lamella_megatron.install()
    args, model, optimizer, scheduler = megatron_lm.build(
        *SHARDED, "--save", str(directory), "--save-interval", "3", *arguments
    )
    megatron_lm.train(args, model, optimizer, scheduler, num_steps=3)
    _save(args, model, optimizer, scheduler)
    return megatron_lm.train(args, model, optimizer, scheduler, num_steps=3)


def _save(args: Any, *state: Any) -> None:
    training = importlib.import_module("megatron.training.training")
    training.save_checkpoint(args.iteration, *state, 1234)


def _resume(directory: Path, *arguments: str) -> History:
    lamella_megatron.install()
    args, model, optimizer, scheduler = megatron_lm.build(*SHARDED, "--load", str(directory), *arguments)
    assert (args.iteration, args.consumed_train_samples) == (3, 24)
    assert args.num_floating_point_operations_so_far == 1234
    return megatron_lm.train(args, model, optimizer, scheduler, num_steps=3)


def test_a_run_goes_on_to_the_bit_on_the_same_ranks(tmp_path: Path) -> None:
    """With dropout: random states are the checkpoint's too."""
    expected = run_ranks(_train_and_save, 2, tmp_path, *DROPOUT)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert run_ranks(_resume, 2, tmp_path, *DROPOUT) == expected
    other = run_ranks(_resume, 2, tmp_path, *DROPOUT, "--no-load-rng")
    assert other != expected


@pytest.mark.parametrize(
    ("num_ranks", "arguments"), [(1, ""), (4, ""), (2, "--data-parallel-sharding-strategy optim")], ids=str
)
def test_a_run_goes_on_on_other_ranks(saved: tuple[Path, History], num_ranks: int, arguments: str) -> None:
    directory, expected = saved
    for history in run_ranks(_resume, num_ranks, directory, *arguments.split()):
        torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, programs: None) -> tuple[Path, History]:
    directory = tmp_path_factory.mktemp("saved")
    return directory, run_ranks(_train_and_save, 2, directory)[0]


def _save_torch_dist(directory: Path, *arguments: str) -> History:
    """Steps of megatron's own optimizer, saved; the losses of two more."""
    tensor_type = torch.Tensor.type

    def type_on_gpu(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """A name as megatron-core's distributed optimizer expects."""
        name = tensor_type(tensor, *arguments, **options)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    with patch.object(torch.Tensor, "type", type_on_gpu):
        args, model, optimizer, scheduler = megatron_lm.build(
            "--ckpt-format", "torch_dist", "--save", str(directory), "--save-interval", "3", *arguments
        )
        megatron_lm.train(args, model, optimizer, scheduler, num_steps=3)
        _save(args, model, optimizer, scheduler)
        return megatron_lm.train(args, model, optimizer, scheduler, num_steps=2)


def _resume_converted(directory: Path, *arguments: str) -> History:
    lamella_megatron.install()
    args, model, optimizer, scheduler = megatron_lm.build(*SHARDED, "--load", str(directory), *arguments)
    return megatron_lm.train(args, model, optimizer, scheduler, num_steps=2)


def _with_names_of_norms(source: Source) -> Source:
    """The names in a model whose norms are modules of their own, as they are without Transformer Engine."""

    def local_name(name: str) -> str:
        name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")

    return rename(source, local_name)


@pytest.mark.parametrize("arguments", ["", "--bf16 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"])
def test_a_run_of_megatrons_own_optimizer_goes_on(tmp_path: Path, arguments: str) -> None:
    """The fp32 main weights, the moments and the step are in `torch_dist`, under other names for each optimizer."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    [expected] = run_ranks(_save_torch_dist, 1, tmp_path / "a", *arguments.split())
    convert(tmp_path / "a", tmp_path / "b" / "iter_0000003", to="fsdp_dtensor", translate=_with_names_of_norms)
    (tmp_path / "b" / "latest_checkpointed_iteration.txt").write_text("3")
    [history] = run_ranks(_resume_converted, 1, tmp_path / "b", *arguments.partition(" ")[0].split())
    assert [loss for loss, _ in history] == [loss for loss, _ in expected]


def _loaded(directory: Path, *arguments: str) -> tuple[int, int, float, dict[str, torch.Tensor]]:
    """The iteration, the number of parameters with optimizer state, the learning rate, and the weights."""
    lamella_megatron.install()
    args, model, optimizer, _ = megatron_lm.build(*SHARDED, "--load", str(directory), *arguments)
    weights = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model[0].named_parameters()
    }
    return args.iteration, len(optimizer.optimizer.state), optimizer.param_groups[0]["lr"], weights


def test_parts_of_a_checkpoint_are_left_out_as_asked(saved: tuple[Path, History]) -> None:
    directory, _ = saved
    [resumed] = run_ranks(_loaded, 1, directory)
    [finetuned] = run_ranks(_loaded, 1, directory, "--finetune")
    [without] = run_ranks(_loaded, 1, directory, "--no-load-optim")
    assert (resumed[0], finetuned[0], without[0]) == (3, 0, 3)
    assert resumed[1] == len(resumed[3]) and finetuned[1] == without[1] == 0
    assert resumed[2] > finetuned[2] == 0  # the schedule begins anew, with its warm-up
    for weights in (finetuned[3], without[3]):
        assert weights.keys() == resumed[3].keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in resumed[3].items())


def test_a_loss_scale_absent_from_the_checkpoint_begins_anew_with_a_warning(saved: tuple[Path, History]) -> None:
    directory, _ = saved
    [(*position, warnings)] = run_ranks(_place, 1, directory, "--fp16")
    assert position == [3, 24, 24]
    assert "lacks grad_scaler.scale" in warnings


def _rates(directory: Path, *arguments: str) -> list[float]:
    """The learning rate of each parameter group after a load, and after another step."""
    lamella_megatron.install()
    args, model, optimizer, scheduler = megatron_lm.build(*SHARDED, "--load", str(directory), *arguments)
    rates = [group["lr"] for group in optimizer.param_groups]
    megatron_lm.train(args, model, optimizer, scheduler, num_steps=1)
    return [*rates, *(group["lr"] for group in optimizer.param_groups)]


def test_a_learning_rate_of_the_command_line_counts_if_asked_to(saved: tuple[Path, History]) -> None:
    directory, _ = saved
    [expected] = run_ranks(_rates, 1, directory)
    rates = ("--lr", "0.02", "--min-lr", "0.002")
    [overridden] = run_ranks(_rates, 1, directory, *rates, "--override-opt-param-scheduler")
    assert overridden == pytest.approx([2 * rate for rate in expected])
    assert run_ranks(_rates, 1, directory, *rates, "--use-checkpoint-opt-param-scheduler") == [expected]
    with pytest.raises(RankFailure, match=r"'max_lr': 0.02(.|\n)*got (.|\n)*'max_lr': 0.01"):
        run_ranks(_rates, 1, directory, *rates)


def test_a_rate_of_the_embedding_alone_is_not_lost(saved: tuple[Path, History]) -> None:
    directory, _ = saved
    with pytest.raises(RankFailure, match=r"'max_lr': 0.5(.|\n)*--override-opt-param-scheduler"):
        run_ranks(_rates, 1, directory, "--decoupled-lr", "0.5")
    [rates] = run_ranks(_rates, 1, directory, "--decoupled-lr", "0.5", "--override-opt-param-scheduler")
    assert max(rates) > 0.4


def test_a_release_gives_its_weights_alone(saved: tuple[Path, History], tmp_path: Path) -> None:
    directory, _ = saved
    (tmp_path / "release").symlink_to(directory / "iter_0000003")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    [released], [resumed] = run_ranks(_loaded, 1, tmp_path), run_ranks(_loaded, 1, directory)
    assert released[:3] == (0, 0, 0)
    assert all(torch.equal(released[3][name], tensor) for name, tensor in resumed[3].items())


def _padding(directory: Path, *arguments: str) -> tuple[dict[str, torch.Tensor], float, str]:
    """The rows of embedding and output layer, in weights and moments; the loss of a step; and the warnings."""
    lamella_megatron.install()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        args, model, optimizer, scheduler = megatron_lm.build(*SHARDED, "--load", str(directory), *arguments)
    global_model = GlobalModel(model)
    global_optimizer = GlobalOptimizer(optimizer.optimizer, global_model)
    rows: dict[str, torch.Tensor] = {}
    for name, weight in global_model.state_dict().items():
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            slots = {slot: value for slot, value in global_optimizer.state[weight].items() if slot != "step"}
            rows |= {
                f"{name}.{slot}": tensor.detach().full_tensor().clone()
                for slot, tensor in {"weight": weight, **slots}.items()
            }
    [(loss, _)] = megatron_lm.train(args, model, optimizer, scheduler, num_steps=1, data=_tokens(args))
    return rows, loss, output.getvalue().partition("WARNING: the checkpoint")[2]


def _tokens(args: Any) -> Any:
    """Batches of tokens alone, as many for each padding."""
    args.padded_vocab_size, padded = 62, args.padded_vocab_size
    wrap = importlib.import_module("megatron.core.rerun_state_machine").RerunDataIterator
    data = wrap(iter([*islice(megatron_lm.batches(args, first_step=3), 8)]))
    args.padded_vocab_size = padded
    return data


UNTIED = ("--untie-embeddings-and-output-weights",)


@pytest.mark.parametrize("untied", [(), UNTIED], ids=["tied", "untied"])
def test_a_run_goes_on_with_another_padding_of_the_vocabulary(tmp_path: Path, untied: tuple[str, ...]) -> None:
    """62 tokens are 62 rows on one tensor-parallel rank and 64 on two, and back."""
    run_ranks(_train_and_save, 1, tmp_path, *untied)
    [(rows, loss, _)] = run_ranks(_padding, 1, tmp_path, *untied)
    assert len(rows) == (6 if untied else 3)
    padded = run_ranks(_padding, 2, tmp_path, "--tensor-model-parallel-size", "2", *untied)
    for padded_rows, padded_loss, _ in padded:
        assert padded_rows.keys() == rows.keys()
        for name, tensor in padded_rows.items():
            assert torch.equal(tensor[:62], rows[name])
            assert tensor.shape[0] == 64 and not tensor[62:].any()
        assert padded_loss == pytest.approx(loss, abs=0.05)  # two tokens more to choose from


def test_rows_of_padding_are_cut_off(tmp_path: Path) -> None:
    run_ranks(_train_and_save, 1, tmp_path, "--make-vocab-size-divisible-by", "8")
    [(padded_rows, _, _)] = run_ranks(_padding, 1, tmp_path, "--make-vocab-size-divisible-by", "8")
    [(rows, _, _)] = run_ranks(_padding, 1, tmp_path)
    for name, tensor in rows.items():
        assert len(tensor) == 62
        assert torch.equal(tensor, padded_rows[name][:62])


def test_another_vocabulary_is_refused_or_left_out_with_a_warning(saved: tuple[Path, History]) -> None:
    directory, _ = saved
    difference = r"word_embeddings.weight: \(62, 32\) in the checkpoint, \(70, 32\) here"
    with pytest.raises(RankFailure, match=difference + r"(.|\n)*--no-strict-fsdp-dtensor-load"):
        run_ranks(_padding, 1, directory, "--vocab-size", "70")
    [(_, _, warnings)] = run_ranks(_padding, 1, directory, "--vocab-size", "70", "--no-strict-fsdp-dtensor-load")
    assert re.search(difference, warnings)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_finds_entries_under_megatrons_names(saved: tuple[Path, History]) -> None:
    directory, _ = saved
    path = directory / "iter_0000003"
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    assert {"args", "iteration", "opt_param_scheduler.num_steps"} <= metadata.keys()
    assert "rng_state.(0, 0).0.torch_rng_state" in metadata
    assert any(name.startswith("model.module.") for name in metadata)
    state: dict[str, Any] = {"args": None, "iteration": None, "opt_param_scheduler": {"num_steps": None}}
    load(state, checkpoint_id=path, no_dist=True)
    assert (state["iteration"], state["args"].consumed_train_samples) == (3, 24)
    assert state["opt_param_scheduler"]["num_steps"] == 24


def test_random_states_of_all_tensor_parallel_ranks_are_saved(tmp_path: Path) -> None:
    run_ranks(_train_and_save, 2, tmp_path, "--tensor-model-parallel-size", "2")
    metadata = FileSystemReader(tmp_path / "iter_0000003").read_metadata().state_dict_metadata
    assert {f"rng_state.(0, {rank}).0.torch_rng_state" for rank in (0, 1)} <= metadata.keys()


def test_without_a_checkpoint_a_run_begins_anew(tmp_path: Path) -> None:
    assert run_ranks(_loaded, 1, tmp_path)[0][0] == 0


def _train_and_save_by_hand(directory: Path, *entries: str) -> None:
    """Three steps, saved by `lamella_megatron.save_checkpoint` with the arguments, the schedule, or neither."""
    lamella_megatron.install()
    args, model, optimizer, scheduler = megatron_lm.build(*SHARDED)
    megatron_lm.train(args, model, optimizer, scheduler, num_steps=3)
    lamella_megatron.save_checkpoint(
        directory / "iter_0000003",
        model=model,
        optimizer=optimizer.optimizer,
        iteration=3,
        args=args if "args" in entries else None,
        objects={"opt_param_scheduler": scheduler.state_dict()} if "opt_param_scheduler" in entries else None,
    )
    (directory / "latest_checkpointed_iteration.txt").write_text("3")


def _place(directory: Path, *arguments: str) -> tuple[int, int, int, str]:
    """The iteration, the samples consumed, the steps of the schedule in samples, and the warnings."""
    lamella_megatron.install()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        args, _, _, scheduler = megatron_lm.build(*SHARDED, "--load", str(directory), "--no-load-rng", *arguments)
    warnings = "".join(line for line in output.getvalue().splitlines() if line.startswith("WARNING: the checkpoint"))
    return args.iteration, args.consumed_train_samples, scheduler.num_steps, warnings


@pytest.mark.parametrize(
    ("entries", "absent", "place"),
    [
        (("args",), "opt_param_scheduler.num_steps", (3, 24, 0)),
        (("opt_param_scheduler",), "args.consumed_train_samples", (3, 0, 24)),
    ],
)
def test_a_checkpoint_without_schedule_or_place_in_the_data_is_refused(
    tmp_path: Path, entries: tuple[str, ...], absent: str, place: tuple[int, int, int]
) -> None:
    run_ranks(_train_and_save_by_hand, 1, tmp_path, *entries)
    with pytest.raises(RankFailure, match=rf"Expected .*{absent}.* got none(.|\n)*--finetune"):
        run_ranks(_place, 1, tmp_path)
    [(*position, warnings)] = run_ranks(_place, 1, tmp_path, "--no-strict-fsdp-dtensor-load")
    assert tuple(position) == place
    assert absent in warnings
    assert run_ranks(_place, 1, tmp_path, "--finetune") == [(0, 0, 0, "")]


def test_a_checkpoint_saved_by_hand_with_arguments_and_schedule_goes_on(tmp_path: Path) -> None:
    run_ranks(_train_and_save_by_hand, 1, tmp_path, "args", "opt_param_scheduler")
    assert run_ranks(_place, 1, tmp_path) == [(3, 24, 24, "")]


def _first_random_number(directory: Path, *arguments: str) -> tuple[float, str]:
    """The next number of Python's generator after a load, and the warnings."""
    lamella_megatron.install()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        megatron_lm.build(*SHARDED, "--load", str(directory), *arguments)
    return random.random(), output.getvalue().partition("WARNING: the checkpoint")[2]


def test_a_run_with_random_states_of_data_parallel_ranks_goes_on_on_more_ranks(tmp_path: Path) -> None:
    run_ranks(_train_and_save, 2, tmp_path, "--data-parallel-random-init")
    numbers, warnings = zip(*run_ranks(_first_random_number, 4, tmp_path, "--data-parallel-random-init"), strict=True)
    assert len({*numbers}) == 4
    assert "lacks 2 of 4 random states" in warnings[0]
    assert numbers[:2] == tuple(
        number for number, _ in run_ranks(_first_random_number, 2, tmp_path, "--data-parallel-random-init")
    )


def test_absent_random_states_are_told(saved: tuple[Path, History], tmp_path: Path) -> None:
    directory, _ = saved
    parallel = ("--tensor-model-parallel-size", "2")
    assert "lacks 1 of 2 random states" in run_ranks(_first_random_number, 2, directory, *parallel)[0][1]
    assert run_ranks(_first_random_number, 2, directory, "--no-load-rng", *parallel)[0][1] == ""
    run_ranks(_train_and_save, 1, tmp_path, "--no-save-rng")
    [(_, warnings)] = run_ranks(_first_random_number, 1, tmp_path)
    assert "lacks 1 of 1 random states" in warnings


@pytest.mark.parametrize("kind", ["global", "local"])
def test_checkpoints_that_megatron_would_not_read_are_refused(kind: str) -> None:
    def on_the_rank() -> None:
        lamella_megatron.install()
        args = megatron_lm.begin(*SHARDED)
        args.non_persistent_ckpt_type = kind
        with pytest.raises(ValueError, match=f"Expected `--non-persistent-ckpt-type` to be unset, got '{kind}'"):
            megatron_lm.set_up()

    run_ranks(on_the_rank, 1)


def test_a_save_in_megatrons_background_is_refused_before_training(tmp_path: Path) -> None:
    def on_the_rank() -> None:
        lamella_megatron.install()
        args = megatron_lm.begin(*SHARDED, "--save", str(tmp_path), "--save-interval", "3")
        args.async_save = True  # megatron takes the option back on hosts without its library
        with pytest.raises(ValueError, match="Expected `--async-save` to be unset"):
            megatron_lm.set_up()

    run_ranks(on_the_rank, 1)
