"""The programs of examples/megatron train on two GPUs, by megatron's own `pretrain`, and go on where they stopped."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lamella_testing.torchrun import torchrun

EXAMPLES = Path(__file__).parents[4] / "examples" / "megatron"
COMMON = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --lr-decay-iters 10 --bf16 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--save-interval 4 --log-params-norm --manual-gc --num-workers 0 --no-gradient-accumulation-fusion"
)
LOCAL = "--num-layers 2 --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion"
MAMBA = "--mamba-state-dim 32 --mamba-head-dim 64 --mamba-num-groups 2 --mamba-num-heads 8"
HYBRID = f'--hybrid-layer-pattern "M*-M*-" {MAMBA}'
WITH_EXPERTS = (
    f'--hybrid-layer-pattern "M*EM*E" {MAMBA} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall '
    "--moe-grouped-gemm --expert-model-parallel-size 2 --disable-bias-linear"
)


def _losses(script: str, arguments: str) -> dict[int, float]:
    """The logged losses of a run by iteration."""
    environment = {"MAMBA_DETERMINISTIC": "1"}  # Else mamba-ssm compiles all kernels' configurations.
    output = torchrun(2, str(EXAMPLES / script), *shlex.split(arguments), environment=environment)
    logged = re.findall(r"iteration\s+(\d+)/.*?lm loss: ([\d.E+-]+)", output)
    return {int(iteration): float(loss) for iteration, loss in logged}


@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("pretrain_gpt.py", LOCAL),
        pytest.param("pretrain_hybrid.py", HYBRID, marks=pytest.mark.hybrid),
        pytest.param("pretrain_hybrid.py", WITH_EXPERTS, marks=pytest.mark.hybrid),
    ],
)
def test_a_program_trains_evaluates_saves_and_goes_on(tmp_path: Path, script: str, arguments: str) -> None:
    arguments = f"{COMMON} {arguments} --save {tmp_path}"
    straight = _losses(script, f"{arguments} --train-iters 7 --exit-interval 7")
    assert sorted(straight) == [1, 2, 3, 4, 5, 6, 7]
    assert straight[7] < straight[1]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = _losses(script, f"{arguments} --train-iters 7 --load {tmp_path}")
    # Megatron's line of a run's second iteration has the mean loss of the first two.
    expected = {5: straight[5], 6: (straight[5] + straight[6]) / 2, 7: straight[7]}
    assert resumed == pytest.approx(expected, rel=1e-3)  # kernels of backward may add in another order
