"""Functions by which axolotl, LLaMA-Factory and AutoModel shard, and axolotl's plugin, on CPU ranks.

The session installs the three tools without their dependencies: here run the parts that shard, and no command line.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from axolotl.integrations.base import PluginManager
from axolotl.monkeypatch.accelerate.fsdp2 import fsdp2_prepare_model
from axolotl.utils.dict import DictDefault
from client_models import let_accelerate_shard_on_cpus, tiny_llama, tokens
from llamafactory.v1.accelerator import interface
from llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2 import FSDP2Engine
from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import lamella_engine
from lamella_integration.in_place import run_in_both, units, unsharded_copy
from lamella_transformers.trainer import ShardedTraining

PLUGIN = "lamella_transformers.axolotl.LamellaPlugin"


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"]))


def trained(model: Any) -> list[object]:
    """Units, losses and norms of four steps, and trained weights."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    ids = tokens().chunk(dist.get_world_size())[dist.get_rank()]
    losses, norms = [], []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trainable, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [units(model), *map(unsharded_copy, (losses, norms, trainable))]


def by_axolotl(model: Any) -> Any:
    """axolotl puts its function into Accelerate's place."""
    let_accelerate_shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerate.accelerator.fsdp2_prepare_model = fsdp2_prepare_model
    optimizer = torch.optim.SGD(model.parameters())  # Accelerate wants one beside the model
    return Accelerator(fsdp_plugin=plugin, cpu=True).prepare(model, optimizer)[0]


def by_llama_factory(model: Any) -> Any:
    interface.init_process_group = lambda **_: None  # The process group exists.
    interface.DistributedInterface()
    return FSDP2Engine({}).prepare_model(model)


def by_automodel(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    return fsdp2_strategy_parallelize(model, mesh, mp_policy=policy)


SHARDS = {"axolotl": by_axolotl, "LLaMA-Factory": by_llama_factory, "AutoModel": by_automodel}


@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole", "LoRA"])
@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_the_tools_own_sharding_trains(shard: Any, has_adapters: bool) -> None:
    def program(_: Path) -> object:
        model = tiny_llama()
        return trained(shard(adapted(model) if has_adapters else model))

    run_in_both(program)


# -- axolotl's plugin -------------------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> Any:
    """axolotl's manager with lamella's plugin, named as a YAML names the plugin."""
    manager = PluginManager.get_instance()
    manager.register(PLUGIN)
    yield manager
    manager.plugins.clear()


def test_the_plugin_puts_lamella_in_place_before_the_model_is_loaded(manager: Any) -> None:
    theirs = torch.distributed.fsdp.fully_shard
    manager.pre_model_load(DictDefault({}))
    installed = torch.distributed.fsdp.fully_shard
    lamella_engine.install().undo()  # a second installation: changes nothing
    assert installed is not theirs
    assert installed.__module__.startswith("lamella_engine")


def test_the_plugin_gives_the_trainer_a_callback_with_the_settings_of_the_yaml(manager: Any) -> None:
    cfg = DictDefault({"lamella_keep_budget": 1024, "lamella_overlap": False})
    [callback] = manager.add_callbacks_pre_trainer(cfg, None)
    assert isinstance(callback, ShardedTraining)
    assert vars(callback) | {"_keep_budget": 1024, "_overlap": False} == vars(callback)


def test_the_plugin_names_settings_that_axolotl_accepts(manager: Any) -> None:
    [name] = manager.get_input_args()
    module, _, cls = name.rpartition(".")
    settings = getattr(importlib.import_module(module), cls)(lamella_keep_budget=1)
    assert settings.lamella_keep_budget == 1
