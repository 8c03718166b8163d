"""Gradients, moments and main weights in dtypes of their own, under megatron-core's options."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from background import FORMATS, assert_same_files, save_thrice
from precision_kinds import (
    AWARE,
    BF16,
    FP32,
    KINDS,
    NARROW_GRADS,
    backward,
    local_of,
    make_model,
    make_optimizer,
    optimizer_config,
    over_copies,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lamella_megatron import load_checkpoint, save_checkpoint
from lamella_testing import run_ranks

if TYPE_CHECKING:
    from lamella_megatron.training import ShardedModel, ShardedOptimizer

NUM_RANKS, NUM_STEPS = 2, 3


class FusedAdam(Optimizer):
    """Transformer Engine's optimizer in plain torch: plain tensors, gradients in any dtype, moments and remainders.

    Remainders are the low 16 bits of an fp32 main weight whose high 16 bits are the bf16 weight. Steps are counted in
    groups from the first step on. State dicts are in fp32, and state that was not made here or loaded has no scales.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = FP32,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.scales: dict[torch.Tensor, float] = {}
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.use_decoupled_grad, self.master_weights = use_decoupled_grad, master_weights
        self.master_weight_dtype, self.store_param_remainders = master_weight_dtype, store_param_remainders

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                assert not isinstance(parameter, DTensor), "the kernels take plain tensors"
                gradient = getattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)
                if gradient is not None:
                    self._step(group, parameter, gradient.float())

    def _step(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            self.scales[parameter] = 1.0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.exp_avg_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.exp_avg_sq_dtype)
            if self.master_weights and self.store_param_remainders:
                state["master_param"] = torch.zeros_like(parameter, dtype=torch.int16)
            elif self.master_weights:
                state["master_param"] = parameter.detach().to(self.master_weight_dtype)
        assert self.scales[parameter] == 1.0
        main = parameter.float()
        if self.master_weights and self.store_param_remainders:
            main = _joined(parameter, state["master_param"])
        elif self.master_weights:
            main = state["master_param"].float()
        (beta1, beta2), number = group["betas"], group["step"]
        mean = state["exp_avg"].float().lerp(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().lerp(gradient.square(), 1 - beta2)
        scale = (square / (1 - beta2**number)).sqrt() + group["eps"]
        main = main * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * (mean / (1 - beta1**number)) / scale
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        if self.master_weights and self.store_param_remainders:
            high, low = _split(main)
            parameter.copy_(high)
            state["master_param"].copy_(low)
            return
        if self.master_weights:
            state["master_param"].copy_(main)
        parameter.copy_(main)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """State in fp32; remainders as they are."""
        value: torch.Tensor = self.state[parameter][name]
        return value if value.dtype == torch.int16 else value.float() * self.scales[parameter]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for key, parameter in _by_key(self, state).items():
            if slots := state["state"].get(key):
                state["state"][key] = {name: self.get_unscaled_state(parameter, name) for name in slots}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for key, parameter in _by_key(self, state_dict).items():
            if slots := state_dict["state"].get(key):
                self.scales[parameter] = 1.0
                self.state[parameter] = {name: self._packed(parameter, name, slots[name]) for name in slots}

    def _packed(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        if name == "master_param" and self.store_param_remainders and parameter.dtype == BF16:
            assert value.dtype == torch.int16, "remainders are bits"
            return value.clone()
        dtypes = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return value.to(dtypes.get(name, self.master_weight_dtype), copy=True)


def _by_key(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[int, torch.Tensor]:
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return dict(zip(keys, (p for group in optimizer.param_groups for p in group["params"]), strict=True))


def _split(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = main.contiguous().view(torch.int32)
    return (bits >> 16).to(torch.int16).view(BF16), (bits & 0xFFFF).to(torch.int16)


def _joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) | (low.to(torch.int32) & 0xFFFF)
    return bits.view(FP32)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_adam_steps_on_gradients_and_moments_in_bf16(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)
    ddp, aware = KINDS[kind]

    def on_each_rank() -> None:
        model = make_model(ddp)
        optimizer = make_optimizer(model, **aware)
        alone, copies = over_copies(optimizer)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(model)
            assert {p.grad.dtype for p in copies if p.grad is not None} == {aware["main_grads_dtype"]}
            norm = optimizer.clip_grad_norm(0.5)
            gradients = [p.grad.full_tensor().float() for p in copies if isinstance(p.grad, DTensor)]
            clipped = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-3, atol=0.0)
            assert norm > 0.5, "nothing was clipped"
            for parameter, plain in copies.items():
                plain.decoupled_grad = local_of(parameter.grad)  # type: ignore[attr-defined, arg-type]
            optimizer.step_with_ready_grads()
            alone.step()
            for parameter, plain in copies.items():
                assert torch.equal(local_of(parameter), plain)
        state = optimizer.optimizer.state
        for parameter, plain in copies.items():
            for name, expected in alone.state[plain].items():
                if expected.numel() > 0:
                    assert state[parameter][name].dtype == expected.dtype
                    assert torch.equal(local_of(state[parameter][name]), expected), name

    run_ranks(on_each_rank, NUM_RANKS)


def test_megatron_cores_grad_norm_reads_decoupled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `megatron_fsdp_use_decoupled_grad` its norm would be 0, and nothing clipped."""
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)
    ddp, aware = KINDS["bf16 main weights and remainders"]

    def on_each_rank() -> None:
        from megatron.core.optimizer import MegatronOptimizer

        model = make_model({**ddp, "megatron_fsdp_use_decoupled_grad": True})
        optimizer = make_optimizer(model, **aware)
        backward(model)
        expected = optimizer.get_grad_norm()
        as_megatron_core = [g.square().sum() for g in MegatronOptimizer.get_grads_for_grad_norm(optimizer)]
        dist.all_reduce(square := torch.stack(as_megatron_core).float().sum())
        assert float(square.sqrt()) == pytest.approx(float(expected), rel=1e-2)
        assert expected > 0
        model.zero_grad_buffer()
        assert not any(hasattr(parameter, "decoupled_grad") for parameter in model.parameters())

    run_ranks(on_each_rank, NUM_RANKS)


def _assert_counted(optimizer: ShardedOptimizer) -> None:
    """The bytes that the formula says are the bytes of all tensors, to 1 %."""
    parameters = optimizer.get_parameters()
    tensors_by_kind = {
        "weights": [local_of(p) for p in parameters],
        "gradients": [local_of(p.grad) for p in parameters if p.grad is not None],
        "state": [local_of(t) for p in parameters for t in optimizer.optimizer.state[p].values() if t.ndim > 0],
    }
    counted = {name: sum(t.numel() * t.itemsize for t in tensors) for name, tensors in tensors_by_kind.items()}
    assert optimizer.bytes_at_rest() == counted
    total = sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for ts in tensors_by_kind.values() for t in ts
        }.values()
    )
    assert total <= 1.01 * sum(counted.values()), "more than views of the shards is held"


def test_remainders_make_training_as_exact_as_fp32_main_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """From weights that bf16 holds, bf16 weights with remainders are fp32 main weights, cut instead of rounded."""
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)

    def on_each_rank() -> None:
        weights = []
        for ddp, aware in (KINDS["fp32 main weights"], KINDS["bf16 main weights and remainders"]):
            model = make_model(ddp)
            optimizer = make_optimizer(model, **aware)
            backward(model)
            for parameter in optimizer.get_parameters():
                assert parameter.grad is not None
                local_of(parameter.grad).fill_(2.0**-4)
            optimizer.step_with_ready_grads()
            state = optimizer.optimizer.state
            weights.append(
                [
                    _joined(local_of(p), local_of(state[p]["master_param"])) if p.dtype == BF16 else local_of(p)
                    for p in optimizer.get_parameters()
                    if local_of(p).numel() > 0
                ]
            )
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))

    run_ranks(on_each_rank, 1)


def _train(model: ShardedModel, optimizer: ShardedOptimizer, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if "remainders" in kind else pytest.mark.slow) for kind in KINDS]
)
def test_steps_during_a_save_in_the_background_leave_the_saved_state(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)
    ddp, aware = KINDS[kind]

    def on_each_rank() -> None:
        model = make_model(ddp)
        optimizer = make_optimizer(model, **aware)
        _train(model, optimizer)
        save_thrice(tmp_path, lambda: _train(model, optimizer), model=model.module, optimizer=optimizer.optimizer)

    run_ranks(on_each_rank, 1)  # each rank starts a process with a torch of its own
    assert_same_files(tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=() if kind in ("fp32 main weights", "bf16 main weights and remainders") else pytest.mark.slow
        )
        for kind in KINDS
    ],
)
def test_a_resumed_run_has_the_dtypes_and_the_steps_of_the_saved_run(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By state dicts and by checkpoints, into an optimizer without steps and into one with a step."""
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)
    ddp, aware = KINDS[kind]

    def on_each_rank() -> None:
        saved = make_model(ddp)
        first = make_optimizer(saved, **aware)
        _train(saved, first, 2)
        for form in FORMATS:
            save_checkpoint(tmp_path / form, model=saved.module, optimizer=first.optimizer, format=form)
        runs: dict[str, tuple[ShardedModel, ShardedOptimizer]] = {}
        for way, is_stepped in itertools.product(["state_dict", *FORMATS], [False, True]):
            resumed = make_model(ddp)
            second = make_optimizer(resumed, **aware)
            if is_stepped:
                _train(resumed, second, 1)
            if way == "state_dict":
                resumed.load_state_dict(saved.state_dict())
                second.load_state_dict(first.state_dict())
            else:
                load_checkpoint(tmp_path / way, model=resumed.module, optimizer=second.optimizer)
            runs[f"{way}, {is_stepped=}"] = resumed, second
        for run, (_, second) in runs.items():
            for one, other in zip(first.get_parameters(), second.get_parameters(), strict=True):
                expected, resumed_state = first.optimizer.state[one], second.optimizer.state[other]
                assert resumed_state.keys() == expected.keys()
                for name in expected:
                    assert resumed_state[name].dtype == expected[name].dtype, (run, name)
                    assert torch.equal(local_of(resumed_state[name]), local_of(expected[name])), (run, name)
            assert all(group["step"] == 2 for group in second.optimizer.param_groups), run
        _train(saved, first)
        for run, (resumed, second) in runs.items():
            _train(resumed, second)
            for one, other in zip(first.get_parameters(), second.get_parameters(), strict=True):
                assert torch.equal(local_of(one), local_of(other)), run

    run_ranks(on_each_rank, NUM_RANKS)


@pytest.mark.parametrize(
    ("ddp", "fields", "error", "words"),
    [
        (
            NARROW_GRADS,
            {},
            ValueError,
            r"gradients in torch.float32, the dtype of the main weights, got torch.bfloat16",
        ),
        ({}, AWARE, ValueError, r"gradients in torch.bfloat16, `config.main_grads_dtype`, got torch.float32"),
        (NARROW_GRADS, AWARE, ImportError, r"Expected Transformer Engine's FusedAdam .* got .*Adam"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    ddp: dict[str, Any], fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    def on_each_rank() -> None:
        model = make_model(ddp)
        with pytest.raises(error, match=words):
            make_optimizer(model, **fields)

    run_ranks(on_each_rank, 1)


WIDE: dict[str, Any] = {"hidden_size": 256}  # alignment weighs less than 1 %


@pytest.mark.parametrize("kind", ["adam", "sgd", *KINDS])
def test_bytes_at_rest_are_known_before_the_first_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, fields = KINDS.get(kind, ({}, {"optimizer": kind}))
    if kind in KINDS:
        monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)

    def on_each_rank() -> None:
        model = make_model(ddp, **WIDE)
        optimizer = make_optimizer(model, **fields)
        before = optimizer.bytes_at_rest()
        backward(model)
        optimizer.step()
        assert optimizer.bytes_at_rest() == before
        _assert_counted(optimizer)

    run_ranks(on_each_rank, NUM_RANKS)


def test_moments_in_8_bits_count_with_their_transposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's 8-bit tensors are made with a transpose each, as a GPU's `memory_allocated` shows."""
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)
    ddp, aware = KINDS["bf16 main weights and remainders"]

    def on_each_rank() -> None:
        model = make_model(ddp)
        narrow, eighth = (
            make_optimizer(model, **{**aware, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype})
            for dtype in (BF16, torch.uint8)
        )
        num = sum(local_of(p).numel() for p in model.parameters())
        assert (
            narrow.bytes_at_rest()
            == eighth.bytes_at_rest()
            == {"weights": 2 * num, "gradients": 2 * num, "state": 6 * num}
        )

    run_ranks(on_each_rank, NUM_RANKS)


def test_a_loss_scale_is_taken_out_of_gradients_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)
    ddp, aware = KINDS["fp32 main weights"]

    def on_each_rank() -> None:
        model = make_model(ddp)
        optimizer = make_optimizer(model, **aware, loss_scale=8.0)
        backward(model)
        gradients = [local_of(p.grad) for p in optimizer.get_parameters() if p.grad is not None]
        scaled = [gradient.clone() for gradient in gradients]
        assert optimizer.prepare_grads() is False
        assert all(torch.equal(one * 8, other) for one, other in zip(gradients, scaled, strict=True))
        gradients[0].view(-1)[0] = torch.inf
        before = [local_of(p).clone() for p in optimizer.get_parameters()]
        assert optimizer.step() == (False, None, None)
        assert all(torch.equal(local_of(p), old) for p, old in zip(optimizer.get_parameters(), before, strict=True))

    run_ranks(on_each_rank, NUM_RANKS)


def test_bytes_of_an_unknown_optimizer_are_refused() -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import sharded_optimizer

        optimizer = sharded_optimizer(
            optimizer_config(), [make_model({})], make=lambda groups: torch.optim.Adagrad(groups, lr=0.1)
        )
        with pytest.raises(NotImplementedError, match="got Adagrad, whose state is unknown"):
            optimizer.bytes_at_rest()

    run_ranks(on_each_rank, 1)
