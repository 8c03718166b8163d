"""The caller's `extra` comes back unchanged, on the rank of the save."""

import json
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lamella_checkpoint import (
    AsyncSaver,
    CheckpointDamaged,
    check,
    load,
    random_states,
    restore_random_states,
    save,
    verify,
)
from lamella_checkpoint._base.manifest import MANIFEST_FILE
from lamella_checkpoint._formats.checksums import CHECKSUMS_FILE
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit

schedulers = torch.optim.lr_scheduler
Scheduler = schedulers.LRScheduler


def round_trip(tmp_path: Path, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    save(tmp_path / "a", model=model, extra=extra)
    return load(tmp_path / "a", model=model)


def manifest(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / MANIFEST_FILE).read_text())
    return content


def test_json_in_extra_comes_back_equal_in_a_manifest_that_earlier_releases_read(tmp_path: Path) -> None:
    extra = {"step": 3, "loss": 0.1, "best": None, "done": False, "data": {"file": "ä.txt", "at": [1, [2]]}}
    assert round_trip(tmp_path, extra) == extra
    content = manifest(tmp_path / "a")
    assert content["format_version"] == 1 and content["extra"] == extra and "extra_by_rank" not in content


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, [3, ()])),
        {1: 2, (3, 4): "b", None: [5]},
        {"$lamella": "tuple", "items": [1]},
        Counter({3: 1, 5: 2}),
        {1, 2, "x"},
        frozenset([(1, 2)]),
        b"\x00\xff",
        1 + 2j,
        torch.float8_e4m3fn,
        2**70,
        float("inf"),
        np.float32(0.1),
        np.float64(0.1),
        np.int64(3),
        np.bool_(True),
        np.str_("ä"),
        np.datetime64("2020-02-03"),
    ],
    ids=lambda value: type(value).__name__,  # the order of a set's repr differs between processes
)
def test_a_value_comes_back_with_its_type(tmp_path: Path, value: object) -> None:
    [back] = round_trip(tmp_path, {"value": value}).values()
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.int32),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3).to(torch.float8_e5m2),
        torch.tensor([float("nan")]),
        torch.tensor([7], dtype=torch.uint16),
    ],
    ids=lambda tensor: f"{tensor.dtype}",
)
def test_a_tensor_comes_back_bit_by_bit(tmp_path: Path, tensor: torch.Tensor) -> None:
    back = round_trip(tmp_path, {"value": [tensor]})["value"][0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    bits = [operand.resolve_conj().contiguous().view(-1).view(torch.uint8) for operand in (back, tensor)]
    assert torch.equal(*bits)


def test_an_array_comes_back_with_dtype_and_shape(tmp_path: Path) -> None:
    array = np.arange(6, dtype="i4").reshape(2, 3).T
    back = round_trip(tmp_path, {"array": array})["array"]
    assert back.dtype == array.dtype and back.flags.writeable
    assert np.array_equal(back, array)


def test_a_saved_tensor_is_a_copy_on_the_host_and_gives_no_gradients(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    back = round_trip(tmp_path, {"weight": weight})["weight"]
    assert type(back) is torch.Tensor and not back.requires_grad


def test_any_mapping_will_do(tmp_path: Path) -> None:
    assert round_trip(tmp_path, MappingProxyType({"step": 3})) == {"step": 3}


def test_a_checkpoint_saved_without_extra_loads_an_empty_dict(tmp_path: Path) -> None:
    assert round_trip(tmp_path, None) == {}


def test_a_subclass_comes_back_as_its_base_type(tmp_path: Path) -> None:
    back = round_trip(tmp_path, {"value": defaultdict(int, {"a": 1})})["value"]
    assert back == {"a": 1} and type(back) is dict


def test_a_dict_of_an_earlier_release_keeps_a_key_that_is_now_a_tag(tmp_path: Path) -> None:
    round_trip(tmp_path, {})
    content = manifest(tmp_path / "a") | {"extra": {"value": {"$lamella": "tuple"}}}
    (tmp_path / "a" / CHECKSUMS_FILE).unlink()
    (tmp_path / "a" / MANIFEST_FILE).write_text(json.dumps(content | {"checksums": None}))
    assert load(tmp_path / "a", model=nn.Linear(1, 1)) == {"value": {"$lamella": "tuple"}}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model": nn.Linear(1, 1)}, r"extra\['model'\] to be plain data.*got Linear.*state_dict\(\)"),
        ({0: "a"}, r"keys of `extra` to be strings, got 0"),
        ({"a": {"b": [1, Path("x")]}}, r"extra\['a'\]\['b'\]\[1\] to be plain data.*str\(\) for a path"),
        ({"generator": torch.Generator()}, r"extra\['generator'\].*get_state\(\)"),
        ({"fn": len}, r"extra\['fn'\].*make it anew"),
        ({"meta": torch.empty(1, device="meta")}, r"extra\['meta'\] to be tensors with memory"),
        ({"sparse": torch.eye(2).to_sparse()}, r"extra\['sparse'\] to be plain dense tensors.*to_dense"),
        ({"objects": np.array([object()])}, r"extra\['objects'\] to be NumPy's arrays of"),
        ({"large": torch.empty(1 << 23)}, r"at most 16777216 bytes for extra\['large'\].*buffer"),
        ({"digits": 10**5000}, r"extra\['digits'\] to be integers of up to"),
    ],
)
def test_unloadable_extra_values_are_refused_by_key_before_files_are_written(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        round_trip(tmp_path, extra)
    assert list(tmp_path.iterdir()) == []


def test_a_value_inside_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="holds itself"):
        round_trip(tmp_path, {"loop": loop})


@pytest.mark.parametrize(
    "value",
    [
        {"$lamella": "function"},
        {"$lamella": ["tensor"]},
        {"$lamella": "tensor", "dtype": "float32", "shape": [2**40], "data": ""},
        {"$lamella": "tensor", "dtype": "load", "shape": [1], "data": "AAAAAA=="},
        {"$lamella": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"$lamella": "array", "dtype": "<f4", "shape": [-1], "data": "AAAAAA=="},
        {"$lamella": "tuple", "items": "abc"},
        {"$lamella": "dict", "items": [[[1], 2]]},
        {"$lamella": "bytes", "data": "?"},
    ],
    ids=str,
)
def test_a_form_that_no_save_writes_is_damage(tmp_path: Path, value: object) -> None:
    round_trip(tmp_path, {})
    content = manifest(tmp_path / "a") | {"format_version": 2, "extra": {"value": value}, "checksums": None}
    (tmp_path / "a" / CHECKSUMS_FILE).unlink()
    (tmp_path / "a" / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointDamaged, match=MANIFEST_FILE):
        load(tmp_path / "a", model=nn.Linear(1, 1))


# -- ranks ------------------------------------------------------------------------------------------------------------


def extra_of_rank() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    return {"step": 7, "position": (100 + rank, "file"), "betas": (0.9, 0.95)}


def saved_by_two(kit: Kit, path: Path, extra: Callable[[], dict[str, Any] | None] = extra_of_rank) -> list[Any]:
    def save_and_load() -> tuple[Any, dict[str, Any]]:
        model, _ = kit.build(sharded=True)
        values = extra()
        save(path, model=model, extra=values)
        return values, load(path, model=model)

    return run_ranks(save_and_load, 2)


def loaded(kit: Kit, path: Path) -> tuple[dict[str, Any], list[str]]:
    model, _ = kit.build(sharded=torch.distributed.is_initialized())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = load(path, model=model)
    return values, [str(warning.message) for warning in caught if "extra" in str(warning.message)]


def test_each_rank_loads_its_own_values_of_extra(kit: Kit, tmp_path: Path) -> None:
    for saved, back in saved_by_two(kit, tmp_path / "a"):
        assert back == saved
    assert manifest(tmp_path / "a")["extra_by_rank"] == ["position"]
    assert verify(tmp_path / "a")


def test_values_equal_on_all_ranks_are_stored_once(kit: Kit, tmp_path: Path) -> None:
    saved_by_two(kit, tmp_path / "a", lambda: {"step": 7, "best": 0.5})
    content = manifest(tmp_path / "a")
    assert content["format_version"] == 1 and content["extra"] == {"step": 7, "best": 0.5}
    assert b"extra.1" not in (tmp_path / "a" / ".metadata").read_bytes()


def test_ranks_beyond_the_saved_number_load_none_for_extra_by_rank_and_rank_0_warns(kit: Kit, tmp_path: Path) -> None:
    saved_by_two(kit, tmp_path / "a")
    results = run_ranks(lambda: loaded(kit, tmp_path / "a"), 3)
    assert [values["position"] for values, _ in results] == [(100, "file"), (101, "file"), None]
    assert [values["step"] for values, _ in results] == [7, 7, 7]
    [message], *silent = [messages for _, messages in results]
    assert "Expected 2 ranks, each with its own 'position'" in message and "from 2 on get None" in message
    assert silent == [[], []]


def test_values_of_ranks_that_are_no_more_are_left_out_with_a_warning(kit: Kit, tmp_path: Path) -> None:
    saved_by_two(kit, tmp_path / "a")
    values, [message] = loaded(kit, tmp_path / "a")
    assert values["position"] == (100, "file")
    assert "got 1: values of ranks from 1 on are left out" in message


def test_a_rank_that_gives_nothing_gets_rank_zeros(kit: Kit, tmp_path: Path) -> None:
    results = saved_by_two(kit, tmp_path / "a", lambda: extra_of_rank() if torch.distributed.get_rank() == 0 else None)
    assert [back for _, back in results] == [results[0][0]] * 2


def test_a_key_of_one_rank_comes_back_on_that_rank(kit: Kit, tmp_path: Path) -> None:
    results = saved_by_two(kit, tmp_path / "a", lambda: {"own": [1]} if torch.distributed.get_rank() == 1 else {})
    assert [back for _, back in results] == [{}, {"own": [1]}]


def test_check_tells_each_rank_its_values(kit: Kit, tmp_path: Path) -> None:
    saved_by_two(kit, tmp_path / "a")
    back = run_ranks(lambda: check(tmp_path / "a", model=kit.build(sharded=True)[0]), 2)
    assert [values["position"] for values in back] == [(100, "file"), (101, "file")]


def test_saves_in_the_background_keep_each_ranks_values(kit: Kit, tmp_path: Path) -> None:
    def save_and_load() -> list[dict[str, Any]]:
        model, _ = kit.build(sharded=True)
        with AsyncSaver() as saver:
            for step in range(2):
                saver.save(tmp_path / str(step), model=model, extra=extra_of_rank() | {"step": torch.tensor(step)})
        return [load(tmp_path / str(step), model=model) for step in range(2)]

    for rank, values in enumerate(run_ranks(save_and_load, 2)):
        assert [extra["step"].item() for extra in values] == [0, 1]
        assert [extra["position"] for extra in values] == [(100 + rank, "file")] * 2


def test_a_damaged_value_of_a_rank_is_told(kit: Kit, tmp_path: Path) -> None:
    saved_by_two(kit, tmp_path / "a")
    [file] = (tmp_path / "a").glob("__1_*")
    file.write_bytes(file.read_bytes().replace(b"101", b"102"))
    assert not verify(tmp_path / "a")


# -- random states ----------------------------------------------------------------------------------------------------


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_each_rank_goes_on_with_its_own_random_numbers(kit: Kit, tmp_path: Path) -> None:
    def save_and_load() -> bool:
        model, _ = kit.build(sharded=True)
        seed = torch.distributed.get_rank()
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        draws()
        save(tmp_path / "a", model=model, extra={"random": random_states()})
        expected = draws()
        restore_random_states(load(tmp_path / "a", model=model)["random"])
        return draws() == expected

    assert run_ranks(save_and_load, 2) == [True, True]


def test_a_rank_without_states_keeps_its_generators_and_is_told() -> None:
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="Expected this rank's random states, got none"):
        restore_random_states(None)
    assert torch.equal(torch.get_rng_state(), before)


def test_states_of_an_absent_accelerator_are_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="Expected the accelerator 'xpu9'"):
        restore_random_states(random_states() | {"xpu9": torch.zeros(1)})


def test_restore_random_states_refuses_other_values() -> None:
    with pytest.raises(ValueError, match=r"Expected the value of `random_states\(\)`"):
        restore_random_states({"torch": torch.get_rng_state()})


# -- schedulers -------------------------------------------------------------------------------------------------------


class Decay:
    """A schedule with state, as `LambdaLR` keeps it."""

    def __init__(self) -> None:
        self.rates = (0.9, 0.8)

    def __call__(self, epoch: float) -> float:
        return float(self.rates[int(epoch) % 2] ** epoch)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, Decay()),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 5]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 3), schedulers.MultiStepLR(o, [1, 2])], [3]
    ),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, 1.0, 3), schedulers.MultiStepLR(o, [3, 5])], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "CyclicLR of a function": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Decay(), cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=12),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}
RATES: dict[str, Callable[[], Any]] = {
    "a number": lambda: 1.0,
    "a tensor": lambda: torch.tensor(1.0),
    "NumPy's": lambda: np.float64(1.0),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    torch_schedulers = {name for name in schedulers.__all__ if name != "LRScheduler"}
    assert torch_schedulers <= SCHEDULERS.keys()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning", "ignore:.*epoch parameter:UserWarning")
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_scheduler_has_the_rates_of_one_that_went_on(tmp_path: Path, name: str, rate: str) -> None:
    def fresh() -> tuple[nn.Linear, torch.optim.Optimizer, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATES[rate]())
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
        values = []
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            values.append(float(optimizer.param_groups[0]["lr"]))
        return values

    model, optimizer, scheduler = fresh()
    rates(optimizer, scheduler, 2)
    save(tmp_path / "a", model=model, optimizer=optimizer, extra={"scheduler": scheduler.state_dict()})
    expected = rates(optimizer, scheduler, 8)
    model, optimizer, scheduler = fresh()
    scheduler.load_state_dict(load(tmp_path / "a", model=model, optimizer=optimizer)["scheduler"])
    assert rates(optimizer, scheduler, 8) == expected


def test_the_manifest_records_format_torch_version_ranks_and_extra(tmp_path: Path) -> None:
    round_trip(tmp_path, {"step": 3})
    content = manifest(tmp_path / "a")
    assert content["format"] == "lamella-checkpoint" and content["format_version"] == 1
    assert content["torch"] == torch.__version__ and content["num_ranks"] == 1
    assert content["extra"] == {"step": 3}
