"""Stand-ins for megatron's wrapper, optimizer, norm and checkpoints. The module imports `megatron.training`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.training import checkpointing
from megatron.training import training as _training  # noqa: F401  # Binds the names to replace.
from megatron.training.global_vars import get_args
from megatron.training.utils import common_utils
from torch import nn

from lamella_megatron._driver.norms import weights_norm
from lamella_megatron._driver.optimizer import ShardedOptimizer, sharded_optimizer
from lamella_megatron._driver.wrapper import ShardedModel
from lamella_megatron._megatron_lm.checkpoints import Checkpoints

Function = Callable[..., Any]

_get_megatron_optimizer: Final[Function] = megatron_optimizer.get_megatron_optimizer
_calc_params_l2_norm: Final[Function] = common_utils.calc_params_l2_norm


class WrapperInPlace(ShardedModel):
    """`ShardedModel` in the form of Megatron-FSDP's wrapper in `megatron.training`, and under the wrapper's name.

    With `--overlap-grad-reduce` the training loop sets `no_sync_func`, and refuses a function set before.

    Raises:
        ValueError: `--async-save` or `--non-persistent-ckpt-type` is set.
    """

    def __init__(self, config: Any, ddp_config: Any, module: nn.Module, **arguments: Any) -> None:
        _check_arguments()
        is_unset = config.no_sync_func is None
        super().__init__(config, ddp_config, module, **arguments)
        if is_unset and ddp_config.overlap_grad_reduce:
            config.no_sync_func = None


def _check_arguments() -> None:
    """Refuse saves in the background, which megatron writes by processes of its own, and non-persistent checkpoints.

    Megatron reads the latter as `torch_dist` alone: no run could go on with them.
    """
    try:
        args = get_args()
    except AssertionError:  # A script without megatron's command line makes the wrapper by itself.
        return
    if getattr(args, "async_save", False):
        raise ValueError(
            "Expected `--async-save` to be unset, got it set. Leave it out, or save by "
            "lamella_megatron.save_checkpoint(..., saver=AsyncSaver())."
        )
    if (kind := getattr(args, "non_persistent_ckpt_type", None)) is not None:
        raise ValueError(
            f"Expected `--non-persistent-ckpt-type` to be unset, got {kind!r}, which megatron "
            "reads as torch_dist alone. Leave it out, and save more often by --save-interval."
        )


@functools.wraps(_get_megatron_optimizer)
def optimizer_in_place(
    config: Any, model_chunks: Sequence[Any], config_overrides: Any = None, **arguments: Any
) -> ShardedOptimizer | Any:
    """`sharded_optimizer` for sharded chunks, megatron's function for all others.

    Gloo groups are for gathering state, needless for shards; the map of parameters to groups is not written.
    """
    if not any(isinstance(chunk, ShardedModel) for chunk in model_chunks):
        return _get_megatron_optimizer(config, model_chunks, config_overrides=config_overrides, **arguments)
    if arguments.get("dump_param_to_param_group_map"):
        raise ValueError(
            "Expected no `--dump-param-to-param-group-map`, got "
            f"{arguments['dump_param_to_param_group_map']!r}. Read the groups from `optimizer.param_groups`."
        )
    return sharded_optimizer(
        config, list(model_chunks), config_overrides=config_overrides, pg_collection=arguments.get("pg_collection")
    )


@functools.wraps(_calc_params_l2_norm)
def norm_in_place(model: Any, *arguments: Any, **named: Any) -> float:
    """`weights_norm` for sharded chunks, megatron's function for all others."""
    chunks = model if isinstance(model, list) else [model]
    if not all(isinstance(chunk, ShardedModel) for chunk in chunks):
        norm: float = _calc_params_l2_norm(model, *arguments, **named)
        return norm
    return weights_norm(chunks)


_checkpoints = Checkpoints(
    generate_state_dict=checkpointing.generate_state_dict,
    load_base_checkpoint=checkpointing._load_base_checkpoint,
    preprocess=checkpointing.preprocess_fsdp_dtensor_state_dict,
    save_checkpoint=checkpointing.save_checkpoint,
)

PAIRS: Final[Sequence[tuple[object, object]]] = [
    (mcore_fsdp_adapter.FullyShardedDataParallel, WrapperInPlace),
    (_get_megatron_optimizer, optimizer_in_place),
    (_calc_params_l2_norm, norm_in_place),
    *_checkpoints.pairs(),
]
"""Each of megatron's classes and functions with lamella's, looked up before any name is replaced."""
