"""Pretrain a HybridModel (Mamba, attention, MLP layers) by `megatron.training` on mock data, sharded by lamella.

    torchrun --nproc-per-node 2 examples/megatron/pretrain_hybrid.py --use-megatron-fsdp --ckpt-format fsdp_dtensor \
        --hybrid-layer-pattern "M*-M*-" --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --hidden-size 64 \
        --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 \
        --global-batch-size 8 --train-iters 10 --lr 1e-3 --bf16 --eval-iters 1 --eval-interval 5 --log-interval 1

Datasets and loss are those of `pretrain_gpt.py`. Layers are Transformer Engine's and mamba-ssm's.
"""

from __future__ import annotations

from megatron.training.argument_utils import hybrid_config_from_args
from pretrain_gpt import main

import lamella_megatron

if __name__ == "__main__":
    lamella_megatron.install()
    main(hybrid_config_from_args)
