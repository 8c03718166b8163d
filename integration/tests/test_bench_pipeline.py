"""The benchmark of pipelines: the decoder in stages has the losses of the decoder, and rows tell what they should."""

from dataclasses import replace

import pytest
import torch

from lamella_integration.bench_pipeline import SCHEDULES, PipelineRow, measure, options_of, table
from lamella_integration.decoder_stages import DecoderStage
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss
from lamella_integration.reference import init_weights
from lamella_integration.stage_times import key_of, slot_ms
from lamella_schedule import ModelChunk, order, run, work
from lamella_testing import run_ranks

CONFIG = LlamaConfig(dim=16, num_layers=4, num_heads=4, num_kv_heads=1, ffn_dim=24, vocab_size=40)
TOKENS = 12
PROGRAM = "--layers 4 --dim 16 --heads 4 --ffn 24 --vocabulary 40 --tokens 12 --steps 1 --repetitions 1"


def _stage(blocks: range) -> DecoderStage:
    return DecoderStage(CONFIG, blocks, length=TOKENS, device=torch.device("cpu"), dtype=torch.float32)


def _row(num: int) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (8, TOKENS + 1), generator=torch.Generator().manual_seed(1))[num][None]


def test_the_stage_of_all_blocks_trains_as_the_decoder() -> None:
    model, stage = Llama(CONFIG), _stage(range(4))
    init_weights(model, seed=0)
    row = _row(0)
    loss = next_token_loss(model(row[:, :-1]), row[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(run([stage.chunk(row[:, :-1], row[:, 1:], 1.0)])[0], loss.detach())
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_every_slot_of_a_stage_in_the_middle_has_a_price() -> None:
    stage, row = _stage(range(1, 3)), _row(0)

    def chunk() -> ModelChunk:
        return stage.chunk(row[:, :-1], row[:, 1:], 1.0)

    prices, host = slot_ms(stage, chunk, [torch.ones(1, TOKENS, 16)], stage=5, num_repetitions=1)
    plans = stage.chunk(row[:, :-1], row[:, 1:], 1.0).plans
    events = [
        event for i in (0, 1) for event in work(order(plans, plans, forward_microbatch=i, backward_microbatch=1 - i))
    ]
    assert prices.keys() == {key_of(replace(event, stage=5)) for event in events}
    assert all(price >= 0 for price in prices.values())
    assert host == 0.0  # a CPU's slots run on the host


def test_a_row_tells_how_far_the_prediction_was_off() -> None:
    row = PipelineRow(
        schedule="1F1B",
        num_stages=2,
        predicted_ms=100.0,
        idle=0.125,
        measured_ms=104.0,
        least_ms=103.0,
        most_ms=105.0,
        slot_ratios=(1.01, 1.02),
        message_ms=0.25,
        host_ms=0.05,
        gib=3.0,
        loss=5.0,
    )
    expected = "| 1F1B | 2 | 12.5% | 100.0 | 104.0 | +4.0% | 103.0 to 105.0 | 1.010 / 1.020 | 3.0 | 5.00000 |"
    assert expected in table([row]).splitlines()


@pytest.mark.gpu2
@pytest.mark.filterwarnings("ignore:.*unbatched P2P op")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
def test_two_gpus_have_the_losses_of_one_order_under_all() -> None:
    rows = run_ranks(_rows, 2, "cuda", device="cuda")[0]
    assert [row.loss for row in rows] == pytest.approx([rows[0].loss] * len(rows), rel=1e-6)


def test_two_cpu_ranks_have_the_losses_of_one_order_under_all() -> None:
    rows = run_ranks(_rows, 2, "cpu")[0]
    assert [row.schedule for row in rows] == list(SCHEDULES)
    assert {row.loss for row in rows} == {rows[0].loss}
    assert all(row.predicted_ms > 0 and row.measured_ms > 0 for row in rows)
    assert all(0 < row.idle < 1 for row in rows)


def _rows(device: str) -> list[PipelineRow]:
    return measure(options_of([*PROGRAM.split(), "--device", device]), torch.device(device))
