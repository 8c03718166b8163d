"""The benchmark of megatron's own `pretrain`: the rows of a program's output."""

import pytest

from lamella_integration.bench_pretrain import parsed

STEP = (
    " [2026-01-01 00:00:00.1] iteration {:8d}/      30 | consumed samples:  8 |"
    " elapsed time per iteration (ms): {:.1f} | learning rate: 1.000000E-04 | global batch size:     8 |"
    " lm loss: {:.6E} | loss scale: 1.0 | grad norm: 1.0 |\n"
)
OUTPUT = "".join(STEP.format(step, ms, loss) for step, ms, loss in [(1, 900, 7), (2, 80, 6), (3, 70, 5), (4, 90, 4)])


def test_a_benchmark_row_has_all_losses_and_the_median_time_of_unskipped_steps() -> None:
    row = parsed("ddp", OUTPUT + "peak memory: [1.5, 2.25]\n", 1)
    assert row.line() == "| ddp | 80.0 | 1.50 | 2.25 | 7.0000 | 4.0000 |"
    assert row.losses == (7, 6, 5, 4)


def test_another_ranks_words_on_the_line_of_the_peak_are_no_part_of_the_peak() -> None:
    assert parsed("ddp", OUTPUT + "peak memory: [1.5, 2.25][rank1]:[W1130] a warning\n", 1).reserved_gib == 2.25


def test_a_program_that_logged_too_little_is_an_error_with_its_last_lines() -> None:
    with pytest.raises(RuntimeError, match=r"more than 4 logged steps and a peak, got 4: .*grad norm"):
        parsed("ddp", OUTPUT, 4)
