"""A megatron-core GPTModel in the adapter's units trains as the unsharded model does, on CPU."""

import contextlib
import importlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lamella_engine import fully_shard
from lamella_megatron import sharding_units
from lamella_testing import assert_trains_as_unsharded, run_ranks

VOCAB_SIZE, LENGTH = 64, 32
BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))


# megatron-core warns about defaults of its own.
pytestmark = pytest.mark.filterwarnings("ignore::Warning:megatron")


@pytest.fixture(scope="module", autouse=True)
def megatron_on_cpu() -> Iterator[None]:
    """Import megatron-core in the parent, once, and take the GPU out of what it does."""
    with warnings.catch_warnings():
        # It warns about each fused library that is not installed, and imports what torch has deprecated.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        random = importlib.import_module("megatron.core.tensor_parallel.random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
        patch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        yield


def make_model() -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config=config, transformer_layer_spec=spec, vocab_size=VOCAB_SIZE, max_sequence_length=LENGTH)


def shard(model: nn.Module) -> None:
    for unit in sharding_units(model):
        fully_shard(unit)
    fully_shard(model)


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(LENGTH).expand(len(batch), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).mean()


def test_two_ranks_train_as_the_unsharded_model_does() -> None:
    assert_trains_as_unsharded(make_model, shard, mean_loss, BATCH)


def test_the_units_are_the_layers() -> None:
    [names] = run_ranks(lambda: [type(unit).__name__ for unit in sharding_units(make_model())], 1)
    assert names == ["TransformerLayer"] * 2


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a megatron-core model .* got Linear"):
        sharding_units(nn.Linear(2, 2))
