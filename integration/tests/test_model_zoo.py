"""Real models in a program, run in three ways: unsharded, with FSDP2, and with lamella. Only an import changes.

Each repeated layer is a unit, and the model is the root. Two steps of AdamW, the second of two microbatches, with
clipping; between steps the model is evaluated, and generates with a cache. lamella's results equal FSDP2's, bit for
bit: losses, logits, generated tokens, norms, every gradient, every weight and buffer, and the names in state dicts.
"""

import copy
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # as in tests/fsdp2: imported once here, for every forked rank
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor._random
from model_zoo import FEW, FSDP2_RAISES, MANY, Inputs, Subject, blocks_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

import lamella_engine  # noqa: F401  looked up by name
import lamella_optim
from lamella_testing import RankFailure, Team

FSDP2 = "torch.distributed.fsdp"
LAMELLA = "lamella_engine"
UNSHARDED = ""

# Warnings of models, and of torch, about the models' own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # compiled
]

Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """Variations of the program.

    Attributes:
        compute: `param_dtype` of a mixed-precision policy; None for no policy.
        reduce: `reduce_dtype` of the policy.
        recompute: `use_reentrant` of gradient checkpointing; None for none.
        each_layer: Linear layers, embeddings and norms are units too, inside their block.
        reshard: `reshard_after_forward`.
        on_meta: Built on the meta device, and loaded from a whole state dict.
        compiled: Blocks are compiled, by a backend without code generation.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    recompute: bool | None = None
    each_layer: bool = False
    reshard: bool | None = None
    on_meta: bool = False
    compiled: bool = False


BF16 = torch.bfloat16
WAYS = {
    "fp32": Way(),
    "bf16": Way(compute=BF16),
    "recomputed": Way(recompute=False),
    "recomputed reentrant": Way(compute=BF16, recompute=True),
    "every layer": Way(each_layer=True),
    "kept": Way(compute=BF16, reshard=False),
    "meta": Way(on_meta=True),
}
# Models with numbers in a separate dtype, which do not compute in bf16, with FSDP2 as with lamella.
FP32_ONLY = {"batch norm", "spectral norm"}
# A kernel reads the weights of linear layers: the layers cannot be units, with FSDP2 as with lamella.
READ_THEIR_CHILDREN = {"falcon_mamba", "jamba"}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team(2)
    team.run(lamella_optim.install)  # Torch's steps on complex DTensors with uneven shards are refused.
    yield team
    team.close()


def _cases(subjects: dict[str, Subject], ways: tuple[str, ...]) -> list[tuple[str, str]]:
    def has(name: str, way: Way) -> bool:
        if (name in FP32_ONLY and way.compute is not None) or (name in READ_THEIR_CHILDREN and way.each_layer):
            return False
        return subjects[name].recomputes or way.recompute is None

    return [(name, way) for name in subjects for way in ways if has(name, WAYS[way])]


RECOMPUTED = ("llama", "mixtral", "deepseek_v3")  # of those tested at each change
SLOW = ("t5", "vit", "falcon_mamba")


def _is_slow(name: str, way: str) -> bool:
    return name in SLOW or (way != "fp32" and name not in RECOMPUTED)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=pytest.mark.slow if _is_slow(name, way) else ())
        for name, way in _cases(FEW, ("fp32", "recomputed reentrant"))
    ],
)
def test_a_model_trains_and_generates_as_with_fsdp2_bit_by_bit(team: Team, name: str, way: str) -> None:
    team.run(partial(_compare, FEW[name], WAYS[way]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), _cases(FEW, tuple(WAYS)[1:3] + tuple(WAYS)[4:]))
def test_lamella_computes_the_same_for_all_options_of_units(team: Team, name: str, way: str) -> None:
    team.run(partial(_compare, FEW[name], WAYS[way]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), _cases(MANY, tuple(WAYS)[:4]))
def test_lamella_computes_the_same_for_many_more_models(team: Team, name: str, way: str) -> None:
    team.run(partial(_compare, MANY[name], WAYS[way]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "bert", "transformer of torch"])
def test_lamella_computes_the_same_for_compiled_blocks(team: Team, name: str) -> None:
    team.run(partial(_compare, FEW[name], Way(compiled=True)))


# Models that a later torch's FSDP2 trains too.
RAISED_BEFORE = {"a vision tower without images, two microbatches": "2.15"}


@pytest.mark.parametrize("name", FSDP2_RAISES)
def test_lamella_trains_models_that_fsdp2_does_not(team: Team, name: str) -> None:
    subject, way = FSDP2_RAISES[name], Way(compute=torch.float32, reduce=torch.float64)
    expected, got = (team.run(partial(_program, module, subject, way)) for module in (UNSHARDED, LAMELLA))
    for a, b in zip(expected, got, strict=True):
        _assert_equal(a, b, rtol=1e-4, atol=1e-5)
    if torch.__version__ >= RAISED_BEFORE.get(name, "3"):
        return
    with pytest.raises(RankFailure, match="no attribute '_unsharded_param'|uniform original parameter dtype"):
        team.run(partial(_program, FSDP2, subject, way))


def _compare(subject: Subject, way: Way) -> None:
    if torch.__version__ >= "2.15" and way.compute is not None:
        # With wider sums, FSDP2 lets autograd widen gradients too: of weights used twice, or in fp32.
        way = replace(way, reduce=way.compute)
    theirs, ours = _program(FSDP2, subject, way), _program(LAMELLA, subject, way)
    _assert_equal(theirs, ours, rtol=0, atol=0)
    if way.compute is None:
        _assert_equal(_program(UNSHARDED, subject, way), ours, rtol=1e-4, atol=1e-5)


def _assert_equal(expected: Trace, got: Trace, **tolerance: Any) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                got[name], value, msg=partial("{}: {}".format, name), equal_nan=True, **tolerance
            )
        else:
            assert got[name] == value, name


# -- the program ------------------------------------------------------------------------------------------------------


def _program(module: str, subject: Subject, way: Way) -> Trace:
    """The observable results of two steps on this rank.

    Args:
        module: The module with `fully_shard`; empty for an unsharded model.
    """
    api = sys.modules[module] if module else None
    torch.manual_seed(0)
    model: Any = _prepared(api, subject, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # an eps above the rounding errors of zero
    trace: Trace = {}

    _backward(model, subject, 0, trace)
    _update(api, model, optimizer, trace, "step 0")

    model.eval()
    with torch.no_grad():
        trace["evaluation"] = _loss(model, subject, 1)
        if subject.generates:
            trace["generated"] = _generate(model, subject)
    model.train()

    for number, is_last in ((2, False), (3, True)):
        if api is not None:
            model.set_requires_gradient_sync(is_last)
        _backward(model, subject, number, trace)
    _update(api, model, optimizer, trace, "step 1")

    state = model.state_dict()
    trace["state dict"] = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    trace |= {name: _full_value(tensor) for name, tensor in state.items()}
    trace["optimizer"] = [sorted(slots) for slots in optimizer.state_dict()["state"].values()]
    if (config := getattr(model, "config", None)) is not None:
        assert pickle.loads(pickle.dumps(config)).to_dict() == copy.deepcopy(config).to_dict()
    return trace


def _prepared(api: ModuleType | None, subject: Subject, way: Way) -> Any:
    model: Any = subject.make()
    if api is not None and way.on_meta:
        state, buffers = model.state_dict(), dict(model.named_buffers())
        with torch.device("meta"):
            model = subject.make()
    if way.recompute is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": way.recompute})
    if way.compiled:
        for block in blocks_of(model):
            block.compile(backend="aot_eager")
    if api is None:
        return model
    _shard(api, model, way)
    if way.on_meta:
        model.to_empty(device="cpu")
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    if subject.generates:  # generation may call parts of the model before the model
        api.register_fsdp_forward_method(model, "generate")
    return model


def _shard(api: ModuleType, model: nn.Module, way: Way) -> None:
    options: dict[str, Any] = {"reshard_after_forward": way.reshard}
    if way.compute is not None:
        options["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=way.compute, reduce_dtype=way.reduce)
    for module in (*(_layers_of(model) if way.each_layer else ()), *blocks_of(model), model):
        if not isinstance(module, api.FSDPModule):
            api.fully_shard(module, **options)


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Modules called for their own parameters, shared with no other module."""
    owners: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm)
    layers = [module for module in model.modules() if type(module) in kinds]
    return [layer for layer in layers if all(owners[parameter] == 1 for parameter in layer.parameters())]


def _inputs(subject: Subject, number: int) -> Inputs:
    """The batch with a number, different on each rank."""
    return subject.draw(torch.Generator().manual_seed(100 * number + dist.get_rank()))


def _loss(model: nn.Module, subject: Subject, number: int) -> torch.Tensor:
    torch.manual_seed(number)  # dropout
    output = model(**_inputs(subject, number))
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    loss: torch.Tensor = output.loss
    return loss


def _generate(model: Any, subject: Subject) -> torch.Tensor:
    prompt = {name: value for name, value in _inputs(subject, 4).items() if name != "labels"}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated: torch.Tensor = model.generate(**prompt, **options)
    return generated


def _backward(model: nn.Module, subject: Subject, number: int, trace: Trace) -> None:
    loss = _loss(model, subject, number)
    loss.backward()  # type: ignore[no-untyped-call]
    trace[f"loss {number}"] = loss.detach()


def _update(api: ModuleType | None, model: nn.Module, optimizer: torch.optim.Optimizer, trace: Trace, at: str) -> None:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if api is None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    trace |= {f"gradient of {name} at {at}": _full_value(gradient) for name, gradient in gradients.items()}
    trace[f"norm at {at}"] = _full_value(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad()


def _full_value(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
