"""Directories of Megatron-LM and Megatron-Bridge open unchanged, and no pickled code runs."""

import os
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lamella_checkpoint import CheckpointDamaged, CheckpointMismatch, load
from lamella_checkpoint.testing import read_all
from lamella_convert import SizeUnknown
from lamella_convert._formats.megatron_files import iteration_directory, open_megatron, plain_contents, train_state
from lamella_convert._formats.open import Format, open_checkpoint
from lamella_convert._tools.convert import convert
from lamella_convert._tools.inspect import inspect


def save(path: Path, values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A warning: no group is initialized.
        dcp.save(values, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]


def counted(*shape: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)


class TestTorchDist:
    stacked = "decoder.layers.self_attention.linear_proj.weight"
    experts = "decoder.layers.mlp.experts.experts.linear_fc1.weight"

    def write(self, path: Path, *, args: Namespace | None = None) -> torch.Tensor:
        model = {
            "embedding.word_embeddings.weight": counted(4, 2).bfloat16(),
            self.stacked: counted(3, 2, 2),
            self.experts: counted(3, 2, 4, 2),
            "decoder.layers.mlp.experts.experts.linear_fc2.weight": counted(3, 2, 2, 2),
            "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": counted(2, 2),
            "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3": b"",
        }
        state = {
            f"optimizer.state.{slot}.{name}": tensor + index
            for index, slot in enumerate(["exp_avg", "exp_avg_sq"], start=1)
            for name, tensor in model.items()
            if isinstance(tensor, torch.Tensor)
        }
        main = counted(4, 2) + 2**-20 + 1.0009765625
        state["optimizer.state.fp32_param.embedding.word_embeddings.weight"] = main
        save(path, model | state | {"rng_state/shard_0_1": [1, 2], "rerun_state_machine_state/shard_0_1": [3]})
        torch.save(
            {
                "args": args or Namespace(tensor_model_parallel_size=2),
                "iteration": 12,
                "checkpoint_version": 3.0,
                "num_floating_point_operations_so_far": 5,
                "optimizer": {"optimizer": {"param_groups": [{"lr": 0.5, "step": 12}, {"lr": 0.25, "step": 12}]}},
                "opt_param_scheduler": {"num_steps": 99},
            },
            path / "common.pt",
        )
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        return main

    def test_stacked_layers_and_experts_come_apart(self, tmp_path: Path) -> None:
        main = self.write(tmp_path)
        opened = open_megatron(tmp_path)
        assert opened.source.left_over == ("rng_state/shard_0_1", "rerun_state_machine_state/shard_0_1")
        values = read_all(opened.source)
        assert opened.format == "torch_dist"
        name = "decoder.layers.2.self_attention.linear_proj.weight"
        assert torch.equal(values[f"model.{name}"], counted(3, 2, 2)[2])
        assert torch.equal(values[f"optimizer.state.{name}.exp_avg_sq"], counted(3, 2, 2)[2] + 2)
        name = "decoder.layers.1.mlp.experts.linear_fc1.weight1"
        assert torch.equal(values[f"model.{name}"], counted(3, 2, 4, 2)[1, 1])
        assert torch.equal(values[f"optimizer.state.{name}.exp_avg"], counted(3, 2, 4, 2)[1, 1] + 1)
        assert "model.mtp.layers.0.mtp_model_layer.self_attention.linear_proj.weight" in values
        assert not any("_extra_state" in name for name in opened.source.objects)
        # The main weights, as they are.
        assert opened.source.tensors["model.embedding.word_embeddings.weight"].dtype == torch.float32
        assert torch.equal(values["model.embedding.word_embeddings.weight"], main)

    def test_common_values_are_objects_and_the_step_every_parameters(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        opened = open_megatron(tmp_path)
        assert opened.sizes == {"tp": 2}
        assert opened.counters.found == {
            "iteration": 12,
            "checkpoint_version": 3.0,
            "num_floating_point_operations_so_far": 5,
        }
        assert opened.counters.lacking == ()
        read = opened.source.read_object
        assert read("opt_param_scheduler.num_steps") == 99
        assert read("optimizer.state.decoder.layers.0.mlp.experts.linear_fc2.weight1.step") == 12
        assert read("optimizer.optimizer.param_groups.1.lr") == 0.25

    @pytest.mark.parametrize("slot", ["fp32_param", "param", "chained_1"])
    def test_main_weights_are_the_models_in_each_format_of_optimizers(self, tmp_path: Path, slot: str) -> None:
        """`param` is of the format `fully_reshardable`; optimizers in a chain may have a prefix."""
        prefix = "chained_1.optimizer.state.fp32_param" if slot == "chained_1" else f"optimizer.state.{slot}"
        main = counted(4, 2) + 2**-20
        save(
            tmp_path,
            {
                "embedding.word_embeddings.weight": main.bfloat16(),
                f"{prefix}.embedding.word_embeddings.weight": main,
                f"{prefix.rpartition('.')[0]}.exp_avg.embedding.word_embeddings.weight": main + 1,
                "common_state/shard_0_1": ({"iteration": 1},),
            },
        )
        values = read_all(open_megatron(tmp_path).source)
        assert values.keys() == {
            "model.embedding.word_embeddings.weight",
            "optimizer.state.embedding.word_embeddings.weight.exp_avg",
        }
        assert torch.equal(values["model.embedding.word_embeddings.weight"], main)

    def test_the_step_of_an_optimizer_that_is_not_distributed_is_every_parameters(self, tmp_path: Path) -> None:
        """megatron-core writes a tensor as `common_step`, and groups without a wrapper around the optimizer."""
        weights = {"a.weight": counted(2, 2), "b.weight": counted(3)}
        state = {f"optimizer.state.exp_avg.{name}": weight + 1 for name, weight in weights.items()}
        optimizer = {"state": {"common_step": torch.tensor(6.0)}, "param_groups": [{"lr": 0.5}, {"lr": 0.25}]}
        save(tmp_path, weights | state | {"common_state/shard_0_1": ({"iteration": 6, "optimizer": optimizer},)})
        source = open_megatron(tmp_path).source
        assert set(source.objects) == {
            "iteration",
            "optimizer.state.a.weight.step",
            "optimizer.state.b.weight.step",
            "optimizer.optimizer.param_groups.0.lr",
            "optimizer.optimizer.param_groups.1.lr",
        }
        assert source.read_object("optimizer.state.b.weight.step") == 6.0

    def test_an_optimizers_buckets_are_told_and_refused(self, tmp_path: Path) -> None:
        """The distributed optimizer's default format, with main weights in fp32."""
        group = "optimizer.distributed.dp_group_idx_0"
        bucket = f"{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        stored = {f"{bucket}.param": counted(6), f"chained_1.{bucket}.exp_avg": counted(6)}
        objects = {f"{group}.per_bucket_numel/shard_0_1": [6]}
        model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
        weights = {name: weight.detach() + 1 for name, weight in model.named_parameters()}
        save(tmp_path / "a", weights | stored | objects | {"common_state/shard_0_1": ({"iteration": 6},)})
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(CheckpointMismatch, match=r"save it by Megatron with --dist-ckpt-optim-fully-reshardable"):
            load(open_checkpoint(tmp_path / "a"), model=model, optimizer=optimizer)
        load(open_checkpoint(tmp_path / "a"), model=model)
        assert torch.equal(model.weight, weights["weight"])
        conversion = convert(tmp_path / "a", tmp_path / "b", to="fsdp_dtensor", translate=lambda source: source)
        assert set(conversion.left) == {*stored, *objects}
        reason = "bfloat16: its main weight is left out; save with --dist-ckpt-optim-fully-reshardable"
        assert conversion.inexact == {f"model.module.{name}": reason for name in weights}
        assert not any("distributed" in name for name in open_megatron(tmp_path / "b").source.objects)

    def test_newer_releases_keep_the_same_in_an_object(self, tmp_path: Path) -> None:
        common = {"args": Namespace(tensor_model_parallel_size=2), "iteration": 12}
        save(tmp_path, {"decoder.layers.mlp.router.weight": counted(2, 2, 2), "common_state/shard_0_1": (common,)})
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        assert open_checkpoint(tmp_path).format is Format.TORCH_DIST
        opened = open_megatron(tmp_path)
        assert (opened.format, opened.sizes, opened.counters.found) == ("torch_dist", {"tp": 2}, {"iteration": 12})
        assert list(opened.source.tensors) == [f"model.decoder.layers.{layer}.mlp.router.weight" for layer in range(2)]

    def test_names_are_listed_without_the_sizes_that_reading_needs(self, tmp_path: Path) -> None:
        name = "model.module.decoder.layers.0.self_attention.in_proj.weight"
        save(tmp_path, {name: counted(8, 2), "checkpoint_version": 3.0})
        assert [entry.name for entry in inspect(tmp_path).entries] == [name, "checkpoint_version"]
        with pytest.raises(SizeUnknown, match="'tp'.*in_proj"):
            _ = open_checkpoint(tmp_path).source

    def test_a_model_alone_is_known_by_its_format(self, tmp_path: Path) -> None:
        save(tmp_path, {"decoder.layers.mlp.router.weight": counted(2, 2, 2)})
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        assert open_megatron(tmp_path).format == "torch_dist"
        (tmp_path / "metadata.json").write_text("{")
        with pytest.raises(CheckpointDamaged, match=r"metadata\.json"):
            open_megatron(tmp_path)

    def test_args_and_the_last_norms_name_go_on_to_fsdp_dtensor(self, tmp_path: Path) -> None:
        source = tmp_path / "a"
        save(source, {"decoder.final_norm.weight": counted(2)})
        torch.save({"args": Namespace(hidden_size=2, tied=False)}, source / "common.pt")
        convert(source, tmp_path / "b", to="fsdp_dtensor")
        raw = open_checkpoint(tmp_path / "b", trust=True).raw
        assert list(raw.tensors) == ["model.module.decoder.final_norm.weight"]
        assert not [name for name in raw.objects if name.startswith("args.")]
        assert raw.read_object("args") == Namespace(hidden_size=2, tied=False)
        assert open_checkpoint(source).tensors.keys() == open_checkpoint(tmp_path / "b").tensors.keys()

    def test_pickled_code_in_torch_dist_args_does_not_run(self, tmp_path: Path) -> None:
        class Harm:
            def __reduce__(self) -> tuple[object, ...]:
                return os.mkdir, (str(tmp_path / "harm"),)

        self.write(tmp_path / "it", args=Namespace(tensor_model_parallel_size=4, bad=Harm()))
        assert open_megatron(tmp_path / "it").sizes == {"tp": 4}
        assert not (tmp_path / "harm").exists()

    def test_a_truncated_common_file_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        content = (tmp_path / "common.pt").read_bytes()
        (tmp_path / "common.pt").write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointDamaged, match=r"common\.pt"):
            open_megatron(tmp_path)

    def test_slots_that_were_stored_flat_are_left_over(self, tmp_path: Path) -> None:
        weight = "decoder.layers.0.self_attention.linear_proj.weight"
        flat = f"optimizer.state.exp_avg.{weight}"
        save(
            tmp_path,
            {weight: counted(2, 2), flat: counted(2, 1, 2), f"optimizer.state.fp32_param.{weight}": counted(4)},
        )
        torch.save({}, tmp_path / "common.pt")
        opened = open_megatron(tmp_path)
        assert opened.source.tensors[f"model.{weight}"].shape == (2, 2)
        assert opened.source.tensors[f"optimizer.state.{weight}.exp_avg"].shape == (2, 1, 2)


class TestBridge:
    weight = "model.module.decoder.layers.0.self_attention.in_proj.weight"

    def write(self, root: Path, *, in_proj: bool = True) -> Path:
        path = root / "iter_0000040"
        values = {f"{self.weight}.query": counted(4, 2)} if in_proj else {self.weight: counted(32, 1)}
        save(path, values | {"iteration": 0, "checkpoint_version": 3.0})
        state = {
            "step": torch.tensor(40, dtype=torch.int32),
            "consumed_train_samples": torch.tensor(640),
            "done": False,
        }
        torch.save(state, path / "train_state.pt")
        torch.save(state, root / "latest_train_state.pt")
        (path / "run_config.yaml").write_text(
            "model:\n  tensor_model_parallel_size: 2\n  linear_num_key_heads: 2\n  linear_key_head_dim: 2\n"
            "  linear_num_value_heads: 4\n  linear_value_head_dim: 2\n  num_layers: 4\nother:\n  num_layers: 5\n"
        )
        return path

    def test_a_directory_of_bridge_gives_its_counters_and_lists_the_missing_entries(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        assert iteration_directory(tmp_path) == path
        opened = open_megatron(tmp_path)
        assert opened.dialect is not None
        assert (opened.format, opened.dialect.name) == ("fsdp_dtensor", "bridge")
        assert opened.counters.found == {
            "checkpoint_version": 3.0,
            "iteration": 40,
            "consumed_train_samples": 640,
            "done": False,
        }
        assert opened.counters.lacking == (
            "args",
            "optimizer",
            "opt_param_scheduler",
            "rng_state",
            "num_floating_point_operations_so_far",
        )
        assert opened.sizes == {"tp": 2, "qk": 4, "v": 8, "nvh": 4}

    def test_bridges_configuration_gives_the_component_sizes_of_fused_tensors(self, tmp_path: Path) -> None:
        self.write(tmp_path, in_proj=False)
        values = read_all(open_megatron(tmp_path).source)
        name = "model.decoder.layers.0.self_attention.in_proj.weight"
        assert values[f"{name}.key"].flatten().tolist() == [2, 3, 18, 19]
        assert values[f"{name}.alpha"].flatten().tolist() == [14, 15, 30, 31]

    def test_megatrons_args_give_the_component_sizes_of_fused_tensors(self, tmp_path: Path) -> None:
        args = Namespace(
            tensor_model_parallel_size=2,
            linear_num_key_heads=2,
            linear_key_head_dim=2,
            linear_num_value_heads=4,
            linear_value_head_dim=2,
        )
        save(tmp_path, {self.weight: counted(32, 1), "args": args})
        opened = open_megatron(tmp_path)
        assert opened.dialect is not None and opened.dialect.name == "release-0.19"
        values = read_all(opened.source)
        assert values["model.decoder.layers.0.self_attention.in_proj.weight.query"].flatten().tolist() == [0, 1, 16, 17]

    def test_no_tracker_leads_outside(self, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
        with pytest.raises(CheckpointDamaged, match="expected an iteration, got '../elsewhere'"):
            iteration_directory(tmp_path)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
        with pytest.raises(CheckpointDamaged, match="'iter_0000007', which is not there"):
            iteration_directory(tmp_path)
        (tmp_path / "iter_0000007").mkdir()
        assert iteration_directory(tmp_path) == tmp_path / "iter_0000007"

    def test_files_that_are_not_torchs_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "train_state.pt").write_bytes(b"no")
        with pytest.raises(CheckpointDamaged, match=r"train_state\.pt"):
            train_state(tmp_path)
        with pytest.raises(CheckpointDamaged, match=r"train_state\.pt"):
            plain_contents(tmp_path / "train_state.pt")


def test_random_states_of_megatrons_ranks_are_told_by_a_conversion(tmp_path: Path) -> None:
    rng_state = {"(0, 0)": [{"torch_rng_state": torch.zeros(3)}]}
    save(tmp_path / "a", {"model": {"module.a": torch.ones(2)}, "checkpoint_version": 3.0, "rng_state": rng_state})
    done = convert(tmp_path / "a", tmp_path / "b", to="dcp", translate=lambda source: source)
    assert done.left == ("rng_state.(0, 0).0.torch_rng_state",)
