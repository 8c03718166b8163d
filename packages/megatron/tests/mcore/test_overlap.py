"""An overlapped step is a step of one microbatch after the other, bit by bit: megatron-core's models on CPU ranks."""

from __future__ import annotations

import importlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamella_engine import ZERO1, ZERO3, FSDPModule, ShardingOptions, UnitResidence
from lamella_engine._modules.attached import units_of
from lamella_schedule import Event, Flight, Kind, Lane, Lanes, LayerPlan, Slot, run_order
from lamella_testing import run_ranks
from lamella_testing.megatron import EXPERTS, LENGTH, VOCAB_SIZE, scale_auxiliary_losses, tiny_config, tiny_hybrid
from lamella_testing.megatron_parity import Layout, has_experts, make_model

NUM_STEPS, NUM_MICROBATCHES, NUM_ROWS = 3, 4, 4
DATA = torch.randint(
    VOCAB_SIZE, (NUM_STEPS, NUM_MICROBATCHES, NUM_ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
)
LAYERNORM = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
Trained = tuple[list[list[float]], dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its ranks, and how its step is taken.

    Attributes:
        kind: Of `make_model`.
        groups: `layer_groups`.
        num_ranks: With two expert-parallel ranks where there are experts.
        tp: Tensor-parallel ranks, with sequence parallelism.
        shares: Whether layers have a shared expert.
        stage: "ZeRO-1" or "ZeRO-3".
        delays: Whether linears leave weight gradients to `backward_dw`.
        early: `early_release`.
        recomputes: Whether norms are recomputed in backward.
        option: A field of the `TransformerConfig` to set; "" for none.
        pads: Whether the last tokens of a row are padding, which no expert sees.
        balances: Whether routers have an auxiliary loss.
    """

    kind: str
    groups: str | None = None
    num_ranks: int = 2
    tp: int = 1
    shares: bool = False
    stage: str = "ZeRO-3"
    delays: bool = False
    early: bool = False
    recomputes: bool = False
    option: str = ""
    pads: bool = False
    balances: bool = False

    def __str__(self) -> str:
        names = ("shares", "delays", "early", "recomputes", "pads", "balances")
        flags = [name for name in names if getattr(self, name)]
        options = [self.option] if self.option else []
        return "-".join([self.groups or self.kind, f"{self.num_ranks} ranks", self.stage, *flags, *options])

    @property
    def layout(self) -> Layout:
        """The ranks."""
        return Layout(num_ranks=self.num_ranks, tp=self.tp, ep=2 if has_experts(self.kind) else 1)


KINDS = [
    ("moe", None),
    ("*E*E", None),
    ("*E*E", "[*E][*E]"),
    ("M*EM*E", "[M*E][M*E]"),
    ("MM*-E", "M[M*]-E"),
    ("MM*-E", "M[M*-]E"),
    ("M*M*", "[M*]M*"),
]
PREDICTIONS = [  # of several tokens
    ("moe-mtp", None),
    ("*E/*E", None),
    ("*E/*E/*E", "[*E]"),
    ("*E/E*E-", None),
]


def _cases(kinds: Sequence[tuple[str, str | None]], nums_ranks: Sequence[int]) -> list[Case]:
    return [
        Case(
            kind=kind,
            groups=groups,
            num_ranks=num_ranks,
            shares=shares,
            stage=stage,
            delays=delays,
            early=early,
            recomputes=recomputes,
        )
        for (kind, groups), num_ranks, stage in itertools.product(kinds, nums_ranks, ("ZeRO-1", "ZeRO-3"))
        for shares, delays, early, recomputes in itertools.product((False, True), repeat=4)
        if has_experts(kind) or not (shares or recomputes)
    ]


ALL = _cases(KINDS, (2, 4)) + _cases(PREDICTIONS, (2,))
SOME = [
    *random.Random(0).sample(_cases(KINDS, (2, 4)), 6),
    Case(kind="moe-mtp", stage="ZeRO-1", shares=True, early=True, recomputes=True, balances=True),
    Case(kind="*E/*E/*E", groups="[*E]", shares=True, delays=True, recomputes=True),
]


def _inputs(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "input_ids": rows[:, :-1],
        "position_ids": torch.arange(LENGTH).expand(len(rows), -1),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "labels": rows[:, 1:],
    }


def _model(case: Case) -> Any:
    from lamella_megatron import fully_shard_model

    shared = {"moe_shared_expert_intermediate_size": 16} if case.shares else {}
    option = {case.option: True} if case.option else {}
    balance = {"moe_aux_loss_coeff": 0.1} if case.balances else {}
    norms = LAYERNORM if case.recomputes else {}
    model = make_model(case.kind, case.layout, **shared, **option, **balance, **norms)
    if case.delays:
        _delay_weight_gradients(model)
    placements = {"ZeRO-1": ZERO1, "ZeRO-3": ZERO3}[case.stage]
    return fully_shard_model(model, options=ShardingOptions(placements=placements), layer_groups=case.groups)


def _microbatches(step: torch.Tensor, case: Case | None = None) -> list[dict[str, torch.Tensor]]:
    from megatron.core import parallel_state

    num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    found = [_inputs(rows.chunk(num)[rank]) for rows in step]
    for i, batch in enumerate(found if case is not None and case.pads else ()):
        batch["padding_mask"] = torch.arange(LENGTH).expand(len(batch["labels"]), -1) >= LENGTH - 4 + i
    return found


def _share(losses: torch.Tensor) -> torch.Tensor:
    return losses.mean() / NUM_MICROBATCHES


def _overlapped(model: Any, step: torch.Tensor, case: Case) -> list[torch.Tensor]:
    from lamella_megatron.training import forward_backward_overlapped

    return forward_backward_overlapped(
        model, _microbatches(step, case), _share, layer_groups=case.groups, early_release=case.early
    )


def _overlapped_batches(model: Any, batches: list[dict[str, Any]]) -> None:
    from lamella_megatron.training import forward_backward_overlapped

    forward_backward_overlapped(model, batches, _share)


def _one_after_the_other(model: Any, step: torch.Tensor, case: Case) -> list[torch.Tensor]:
    scale_auxiliary_losses(NUM_MICROBATCHES)
    losses = []
    for i, batch in enumerate(_microbatches(step, case)):
        model.set_is_last_backward(i == NUM_MICROBATCHES - 1)
        loss = _share(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        for module in reversed(list(model.modules())):
            if hasattr(module, "need_backward_dw"):
                module.backward_dw()
        losses.append(loss.detach())
    return losses


def _train(case: Case, take_step: Callable[[Any, torch.Tensor, Case], list[torch.Tensor]]) -> Trained:
    model = _model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in DATA:
        losses.append([loss.item() for loss in take_step(model, step, case)])
        model.wait_for_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


def _assert_equal_bits(case: Case) -> None:
    expected = run_ranks(_train, case.num_ranks, case, _one_after_the_other)
    found = run_ranks(_train, case.num_ranks, case, _overlapped)
    for (losses, weights), (other_losses, other_weights) in zip(expected, found, strict=True):
        assert losses == other_losses
        assert losses[0] != losses[1], "nothing was learned"
        for name, weight in weights.items():
            assert torch.equal(weight, other_weights[name]), name


@pytest.mark.parametrize("case", SOME, ids=str)
def test_bits_are_those_of_one_microbatch_after_the_other(case: Case) -> None:
    _assert_equal_bits(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in SOME], ids=str)
def test_all_bits_are_those_of_one_microbatch_after_the_other(case: Case) -> None:
    _assert_equal_bits(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(kind="moe-mtp", option="mtp_detach_heads"),
        Case(kind="moe-mtp", pads=True),
        Case(kind="*E/*E/*E", option="mtp_use_repeated_layer"),
        Case(kind="moe-mtp", num_ranks=4, tp=2),
    ],
    ids=str,
)
def test_options_of_predictions_have_their_bits(case: Case) -> None:
    _assert_equal_bits(case)


@pytest.mark.parametrize("case", [Case(kind="mtp"), Case(kind="tied", stage="ZeRO-1")], ids=str)
def test_an_embedding_that_is_read_twice_is_right(case: Case) -> None:
    _assert_equal_bits(case)


def test_units_of_predictions_are_gathered_once_a_pass_and_reduced_once_a_microbatch() -> None:
    def on_each_rank() -> tuple[Counter[str], Counter[str]]:
        from lamella_megatron.training import overlapped_peak_nbytes

        case = Case(kind="*E/*E/*E", groups="[*E]")
        model = _model(case)
        gathers, reductions, counted = Counter[str](), Counter[str](), list[int]()
        groups = [group for unit in units_of(model, recurse=True) for group in unit.parameters.groups]
        buffers = [group.unsharded_weight.flat for group in groups if not group.computes_with_main]

        def weigh() -> None:
            counted.append(sum(buffer.untyped_storage().nbytes() for buffer in buffers))

        for unit in units_of(model, recurse=True):
            dense = unit.parameters.groups[0]
            dense.transport = _Counting(dense.transport, unit.parameters.name, gathers, reductions, weigh)
        _overlapped(model, DATA[0], case)
        assert max(counted) == overlapped_peak_nbytes(model, NUM_MICROBATCHES, layer_groups=case.groups)
        return gathers, reductions

    of_depths = [f"mtp.layers.{depth}{inner}" for depth in (0, 1) for inner in ("", *INSIDE)]
    layers = ["decoder.layers.0, decoder.layers.1", *of_depths]
    for gathers, reductions in run_ranks(on_each_rank, 2):
        assert reductions == dict.fromkeys(["", *layers], NUM_MICROBATCHES)
        # The forward and the backward beside it have the depth in the middle at once.
        num_shared = NUM_MICROBATCHES - 1
        for name in layers:
            is_shared = name.startswith("mtp.layers.0")
            assert gathers[name] == 2 * NUM_MICROBATCHES - is_shared * num_shared, name


INSIDE = (".mtp_model_layer.layers.0", ".mtp_model_layer.layers.1")


class _Counting:
    def __init__(
        self, inner: Any, name: str, gathers: Counter[str], reductions: Counter[str], weigh: Callable[[], None]
    ) -> None:
        self._inner, self._name, self._weigh = inner, name, weigh
        self._counters = {"all_gather": gathers, "reduce_scatter": reductions}

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self._counters:
            self._counters[attribute][self._name] += 1
            self._weigh()  # the unsharded buffer is there
        return getattr(self._inner, attribute)


def test_each_prediction_has_exchanges_of_its_own_in_the_schedule() -> None:
    def on_one_rank() -> set[str]:
        model = make_model("*E/*E/*E", Layout(num_ranks=1))
        with torch.profiler.profile() as profiler:
            _overlapped(model, DATA[0], Case(kind="*E/*E/*E"))
        return {event.name for event in profiler.events()}

    [names] = run_ranks(on_one_rank, 1)
    slots = [f"{slot} {phase}" for slot in ("dispatch", "combine") for phase in ("forward", "backward")]
    with_experts = {f"schedule::{slot} (layer {i})" for slot in slots for i in range(8)} & names
    assert with_experts == {f"schedule::{slot} (layer {i})" for slot in slots for i in (1, 2, 3)}


def test_no_graph_of_a_prediction_runs_twice() -> None:
    def on_one_rank() -> list[float]:
        model: Any = make_model("*E/*E/*E", Layout(num_ranks=1))
        for layer in model.mtp.layers:
            for name in ("enorm", "hnorm", "final_layernorm"):
                setattr(layer, name, nn.Sequential(getattr(layer, name), _Once()))
        return [float(loss) for loss in _overlapped(model, DATA[0], Case(kind="*E/*E/*E"))]

    [losses] = run_ranks(on_one_rank, 1)
    assert len(losses) == NUM_MICROBATCHES


# -- options, slot by slot ---------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events of a schedule, each from its beginning on."""
    events: list[Any] = []
    monkeypatch.setattr(Flight, "run", _noting(Flight.run, events))
    return events


def _noting(call: Callable[..., None], events: list[Any]) -> Callable[..., None]:
    def noted(owner: object, event: Any, *more: Any) -> None:
        events.append(event)
        call(owner, event, *more)

    return noted


def test_the_options_of_a_step_change_its_order(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acquire", "used", "finished"):
        monkeypatch.setattr(UnitResidence, name, _noting(getattr(UnitResidence, name), ran))

    def on_each_rank() -> None:
        from lamella_megatron.training import forward_backward_overlapped, overlapped_peak_nbytes

        model = _model(Case(kind="*E*E"))
        dense = LayerPlan(frozenset((Slot.PRE, Slot.EXPERTS)), frozenset())
        plans = [dense, LayerPlan(delayed=frozenset())] * 2
        peaks = []
        options: dict[str, Any]
        for options in ({}, {"early_release": True}, {"ahead": 0}):
            ran.clear()
            forward_backward_overlapped(model, _microbatches(DATA[0]), _share, **options)
            assert tuple(ran) == run_order(NUM_MICROBATCHES, plans, **options), options
            peaks.append(overlapped_peak_nbytes(model, NUM_MICROBATCHES, **options))
        assert peaks[2] < peaks[0]

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("by_driver", [False, True])
def test_early_release_is_taken_from_the_configuration(ran: list[Any], by_driver: bool) -> None:
    def on_one_rank() -> None:
        from lamella_megatron.training import ShardedModel
        from lamella_testing.megatron import ddp_config

        module: Any = make_model("moe", Layout(num_ranks=1))
        module.config.overlap_moe_expert_parallel_comm = True
        module.config.ep_overlap_early_attn_memory_release = True
        model = ShardedModel(module.config, ddp_config(), module)
        if by_driver:
            _by_driver(model, DATA[0], num_rows=NUM_ROWS)
        else:
            _overlapped_batches(model, _microbatches(DATA[0]))
        backward = ran.index(Event(0, 1, Slot.PRE, Kind.BACKWARD))
        assert backward < ran.index(Event(1, 0, Slot.EXPERTS, Kind.FORWARD))

    run_ranks(on_one_rank, 1)


def test_a_norm_before_experts_is_recomputed_for_their_backward(ran: list[Any]) -> None:
    def on_one_rank() -> None:
        model: Any = make_model("*E", Layout(num_ranks=1), **LAYERNORM)
        norm, called = model.decoder.layers[1].pre_mlp_layernorm, Counter[Any]()
        forward = norm.forward
        norm.forward = lambda *given: (called.update([(ran[-1].slot, ran[-1].kind)]), forward(*given))[1]
        _overlapped(model, DATA[0], Case(kind="*E", groups="[*E]"))
        when = [(Slot.PRE, Kind.FORWARD), (Slot.EXPERTS, Kind.BACKWARD)]
        assert called == dict.fromkeys(when, NUM_MICROBATCHES)

    run_ranks(on_one_rank, 1)


def test_samples_packed_in_one_row_are_balanced_one_by_one() -> None:
    def on_one_rank() -> None:
        packed = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams(qkv_format="thd")
        packed.tokens_per_sample = LENGTH // 2
        losses = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"}
        model: Any = make_model("EE", Layout(num_ranks=1), **losses)
        batches = [{**_inputs(rows[:1]), "packed_seq_params": packed} for rows in DATA[0]]
        scale_auxiliary_losses(NUM_MICROBATCHES)
        for batch in batches:
            _share(model(**batch)).backward()  # type: ignore[no-untyped-call]
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        _overlapped_batches(model, batches)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name

    run_ranks(on_one_rank, 1)


def test_losses_of_predictions_routers_are_booked_behind_the_decoder() -> None:
    def on_one_rank() -> list[int]:
        logging = importlib.import_module("megatron.core.transformer.moe.moe_logging")
        _overlapped(make_model("*E/*E", Layout(num_ranks=1), moe_aux_loss_coeff=0.1), DATA[0], Case(kind="*E/*E"))
        [entry] = logging.get_moe_metrics_tracker()._metrics.values()
        assert len(set(entry.values.tolist())) == 3, entry.values
        return [place + 1 for place, value in enumerate(entry.values.tolist()) if value]

    assert run_ranks(on_one_rank, 1) == [[2, 3]]


def test_sharding_numbers_the_routers_of_predictions_for_steps_without_overlap() -> None:
    def on_one_rank() -> list[int]:
        from lamella_megatron import fully_shard_model

        model: Any = fully_shard_model(make_model("*E/*E", Layout(num_ranks=1)))
        return [module.layer_number for module in model.modules() if hasattr(module, "set_layer_number")]

    assert run_ranks(on_one_rank, 1) == [[2, 2, 3, 3]], "a layer of experts and its router, twice"


def test_communication_saves_no_tensor_of_another_stream_unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    marked, made, unmarked = set[int](), _Made(), list[str]()
    monkeypatch.setattr(Lanes, "mark_read", lambda self, values: marked.update(map(_place, _tensors(values))))
    run = Flight.run

    def checked(flight: Flight, event: Any, around: Any) -> None:
        if event.lane is not Lane.COMMUNICATION or event.kind is not Kind.FORWARD:
            return run(flight, event, around)
        marked.clear()
        made.places.clear()
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with made, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(flight, event, around)
        known = marked | made.places
        unmarked.extend(f"{event}: {tuple(each.shape)}" for each in saved if _place(each) not in known)
        return None

    monkeypatch.setattr(Flight, "run", checked)

    def on_one_rank() -> list[str]:
        _overlapped(make_model("moe", Layout(num_ranks=1)), DATA[0], Case(kind="moe"))
        assert marked
        return unmarked

    assert run_ranks(on_one_rank, 1) == [[]]


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The memory of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: set[int] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(map(_place, _tensors((args, kwargs))))
        made = call(*args, **(kwargs or {}))
        self.places.update(place for place in map(_place, _tensors(made)) if place not in given)
        return made


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class _Once(nn.Module):
    """Passes gradients once a forward, as some fused norms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = _PassOnce.apply(x)  # type: ignore[no-untyped-call]
        return passed


class _PassOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.num_backwards = itertools.count()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert next(ctx.num_backwards) == 0
        return gradient


@pytest.mark.parametrize(("kind", "groups"), [("moe", None), ("*E*E", "[*E][*E]")])
def test_tensor_parallel_ranks_overlap(kind: str, groups: str | None) -> None:
    _assert_equal_bits(Case(kind=kind, groups=groups, num_ranks=4, tp=2))


# -- the last pipeline stage -------------------------------------------------------------------------------------------


def _stage() -> Any:
    """A stage of `*E|/*E`, on two ranks: the last has no layer before the prediction, and a norm that matters."""
    from lamella_megatron import fully_shard_model

    is_first = importlib.import_module("megatron.core.parallel_state").is_pipeline_first_stage()
    config = tiny_config(
        mtp_num_layers=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=2,
        **EXPERTS,
    )
    torch.manual_seed(0)
    model: Any = tiny_hybrid(config, "*E|/*E", pre_process=is_first, post_process=not is_first)
    if not is_first:
        nn.init.normal_(model.decoder.final_norm.weight)
    return fully_shard_model(model)


def test_a_last_stage_without_layers_before_its_prediction_is_its_plain_forward() -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import forward_backward_overlapped

        parallel = importlib.import_module("megatron.core.parallel_state")
        parallel.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
        plain, model = _stage(), _stage()
        if not model.post_process:
            with pytest.raises(ValueError, match=r"the last pipeline stage .*got one with `post_process=False`"):
                forward_backward_overlapped(model, _microbatches(DATA[0]), _share)
            return
        batches, losses = _microbatches(DATA[0]), []
        inputs = torch.randn(2, NUM_MICROBATCHES, LENGTH, NUM_ROWS // 2, 32, generator=torch.Generator().manual_seed(2))
        inputs[1] = inputs[0]
        expected, found = ([each.clone().requires_grad_() for each in copies] for copies in inputs)
        scale_auxiliary_losses(NUM_MICROBATCHES)
        for batch, tensor in zip(batches, expected, strict=True):
            plain.set_input_tensor(tensor)
            loss = _share(plain(**batch))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        normed: list[torch.Tensor] = []
        model.decoder.final_norm.register_forward_hook(lambda *given: normed.append(given[-1]))
        with pytest.raises(ValueError, match=r"`decoder_input`.*got none in microbatch 1"):
            forward_backward_overlapped(model, [{**batches[0], "decoder_input": found[0]}, *batches[1:]], _share)
        stage = [{**batch, "decoder_input": tensor} for batch, tensor in zip(batches, found, strict=True)]
        assert forward_backward_overlapped(model, stage, _share) == losses
        assert len(normed) == NUM_MICROBATCHES, "the norm of an empty decoder, once a microbatch"
        for one, other in zip(expected, found, strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.equal(one.grad, other.grad)
        for (name, weight), other_weight in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(weight.grad.to_local(), other_weight.grad.to_local()), name

    run_ranks(on_each_rank, 4)


# -- weight gradients after the backward -------------------------------------------------------------------------------


def _delay_weight_gradients(model: nn.Module) -> None:
    """Let megatron-core's linears in layers delay weight gradients, by the protocol of Transformer Engine's."""
    for layer in model.modules():
        if type(layer).__name__ in ("ColumnParallelLinear", "RowParallelLinear") and layer is not model.output_layer:
            _Delay(layer)


class _Delay:
    """The weight gradients that one linear owes."""

    def __init__(self, layer: Any) -> None:
        self.owed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.hooks: list[Callable[[], None]] = []
        layer.weight.skip_backward_post_hook = True
        layer._forward_impl = self.forward
        layer.need_backward_dw = lambda: True
        layer.register_wgrad_accumulation_and_reduce_hooks = self.hooks.append
        layer.backward_dw = self.compute

    def forward(self, *, input: torch.Tensor, weight: torch.Tensor, bias: Any, **_: Any) -> torch.Tensor:  # noqa: A002
        made: torch.Tensor = _WithoutWeight.apply(self, input, weight)  # type: ignore[no-untyped-call]
        return made if bias is None else made + bias

    def compute(self) -> None:
        x, gradient, weight = self.owed.pop(0)
        weight.grad = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        for hook in self.hooks:
            hook()


class _WithoutWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delay: _Delay, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.delay, ctx.weight = delay, weight
        ctx.save_for_backward(x)
        return x @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.delay.owed.append((x, gradient, ctx.weight))
        return None, gradient @ ctx.weight, None


# -- in the wrapper, and refused ---------------------------------------------------------------------------------------


def test_a_wrapped_model_steps_by_its_optimizer() -> None:
    from lamella_testing.megatron import ddp_config

    def on_each_rank() -> list[float]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        module: Any = make_model("*E*E", Layout(num_ranks=2, ep=2))
        model = ShardedModel(module.config, ddp_config(), module)
        optimizer = sharded_optimizer(OptimizerConfig(optimizer="adam", lr=0.01), [model])
        losses = []
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            found = _overlapped(model, DATA[0], Case(kind="*E*E"))
            finalize_model_grads([model])
            success, _, _ = optimizer.step()
            assert success
            losses.append(float(sum(found)))
        return losses

    for losses in run_ranks(on_each_rank, 2):
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "groups", "delays", "strategy"),
    [
        ("moe", None, False, "optim"),
        ("moe", None, True, "optim_grads_params"),
        ("*E/*E", "[*E]", False, "optim_grads_params"),
        ("*E*E", "[*E][*E]", True, "optim"),
    ],
)
def test_megatron_cores_driver_overlaps(kind: str, groups: str | None, delays: bool, strategy: str) -> None:
    from lamella_testing.megatron import ddp_config

    def on_each_rank(overlaps: bool, delays: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        module: Any = make_model(kind, Layout(num_ranks=2, ep=2))
        config = module.config
        if delays:
            _delay_weight_gradients(module)
        config.overlap_moe_expert_parallel_comm = overlaps  # the constructor asks for bf16
        model = ShardedModel(config, ddp_config(data_parallel_sharding_strategy=strategy), module, layer_groups=groups)
        optimizer = sharded_optimizer(OptimizerConfig(optimizer="sgd", lr=0.2), [model])
        config.finalize_model_grads_func = finalize_model_grads

        losses = []
        for step in DATA:
            optimizer.zero_grad()
            stored = _by_driver(model, step)
            assert optimizer.step()[0]
            losses += [each["loss"].item() for each in stored]
        return losses, {name: p.detach().full_tensor() for name, p in module.named_parameters()}

    expected = run_ranks(on_each_rank, 2, False, False)  # without a schedule the driver calls no backward_dw
    found = run_ranks(on_each_rank, 2, True, delays)
    for (losses, weights), (other_losses, other_weights) in zip(expected, found, strict=True):
        assert losses == other_losses
        assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


def _by_driver(model: Any, step: torch.Tensor, num_rows: int = NUM_ROWS // 2) -> list[dict[str, torch.Tensor]]:
    """A step of megatron-core's own driver, with the loss of `_share`."""
    driver = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()

    def forward(batches: Any, chunk: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        call = chunk.build_schedule_plan if return_schedule_plan else chunk
        return call(**next(batches)), lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    stored: list[dict[str, torch.Tensor]] = driver(
        forward_step_func=forward,
        data_iterator=iter(_microbatches(step)),
        model=[model],
        num_microbatches=NUM_MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=num_rows,
    )
    return stored


def test_auxiliary_losses_weigh_as_in_megatron_cores_driver() -> None:
    from lamella_testing.megatron import ddp_config

    def on_each_rank() -> None:
        from megatron.core.distributed import finalize_model_grads

        from lamella_megatron.training import ShardedModel

        module: Any = make_model("moe-mtp", Layout(num_ranks=2, ep=2), moe_aux_loss_coeff=0.1)
        model = ShardedModel(module.config, ddp_config(), module)
        module.config.finalize_model_grads_func = finalize_model_grads
        _overlapped(model, DATA[0], Case(kind="moe-mtp"))  # first: the driver leaves its scales behind
        finalize_model_grads([model])
        found = {name: parameter.grad.to_local() for name, parameter in module.named_parameters()}
        module.zero_grad()
        _by_driver(model, DATA[0])
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad.to_local(), found[name]), name

    run_ranks(on_each_rank, 2)


def test_an_exception_leaves_the_model_at_rest() -> None:
    case = Case(kind="*E*E", groups="[*E][*E]")

    def on_each_rank() -> Trained:
        model = _model(case)
        experts = model.decoder.layers[1].mlp
        inner, calls = experts.routed_experts_compute, itertools.count()

        def fail_third(*args: Any) -> Any:
            if next(calls) == 2:
                raise ZeroDivisionError
            return inner(*args)

        experts.routed_experts_compute = fail_third
        with pytest.raises(ZeroDivisionError):
            _overlapped(model, DATA[0], case)
        experts.routed_experts_compute = inner
        assert not any(isinstance(p, nn.Parameter) and not isinstance(p, DTensor) for p in model.parameters())
        assert "forward" not in vars(model.decoder)
        model.zero_grad()
        losses = [loss.item() for loss in _overlapped(model, DATA[0], case)]
        return [losses], {}

    expected = run_ranks(_train, 2, case, _one_after_the_other)
    for (losses, _), (wanted, _) in zip(run_ranks(on_each_rank, 2), expected, strict=True):
        assert losses == wanted[:1]


REFUSED = [
    ("mlp_chunks_for_training", 2),
    ("cpu_offloading", True),
    ("fine_grained_activation_offloading", True),
    ("virtual_pipeline_model_parallel_size", 2),
    ("recompute_granularity", "full"),
    ("recompute_modules", ["moe"]),
    ("moe_shared_expert_overlap", True),
    ("moe_token_dispatcher_type", "allgather"),
    ("cuda_graph_impl", "local"),
    ("overlap_dispatch_backward_with_experts_wgrad", True),
    ("fp8", "hybrid"),
    ("fp4", "e2m1"),
]


def test_an_option_that_no_order_keeps_is_refused() -> None:
    def on_one_rank() -> None:
        from lamella_megatron.training import forward_backward_overlapped

        model: Any = make_model("moe", Layout(num_ranks=1))
        for field, value in REFUSED:
            usual = getattr(model.config, field)
            setattr(model.config, field, value)
            with pytest.raises(ValueError, match=f"`config.{field}` .*{value if isinstance(value, str) else ''}"):
                forward_backward_overlapped(model, [], _share)
            setattr(model.config, field, usual)
        assert not isinstance(model, FSDPModule)

    run_ranks(on_one_rank, 1)


def test_stages_are_refused_for_megatron_cores_driver() -> None:
    def on_one_rank() -> None:
        from lamella_megatron.training import ShardedModel
        from lamella_testing.megatron import ddp_config

        model: Any = make_model("moe", Layout(num_ranks=1))
        model.config.overlap_moe_expert_parallel_comm = True
        model.config.pipeline_model_parallel_size = 2
        with pytest.raises(ValueError, match=r"`config.pipeline_model_parallel_size` to be 1 .*got 2"):
            ShardedModel(model.config, ddp_config(), model)

    run_ranks(on_one_rank, 1)


def test_groups_of_other_layers_are_refused() -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match=r"of the model's 4 layers, got '\[\*E\]', of 2"):
            _overlapped(_model(Case(kind="*E*E")), DATA[0], Case(kind="*E*E", groups="[*E]"))

    run_ranks(on_each_rank, 2)
