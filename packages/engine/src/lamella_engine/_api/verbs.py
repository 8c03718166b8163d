"""lamella's additions to FSDP2's methods: a model's own methods, children and attributes of the same names win."""

from __future__ import annotations

from lamella_engine._api.own_names import yields_to_model
from lamella_engine._modules.attached import state_of
from lamella_engine._modules.handles import Hold
from lamella_engine._modules.state import FSDPState
from lamella_engine._options.options import ShardingOptions
from lamella_engine._unit.weights import UnitWeights


class UnitVerbs:
    """A unit's methods without a counterpart in FSDP2; the last base of a unit's class.

    A model may have had a method, a property, a child or another attribute of the same name before `fully_shard`, or
    gain one later: the name goes on meaning the model's own. `FSDPModule.hold(model)` calls the unit's method then.
    """

    @yields_to_model
    def hold(self) -> Hold:
        """Start gathering this unit's parameters, and keep them until the hold is released; not those of units below.

        For a schedule with several microbatches in a unit at a time: one hold for each microbatch, from before the
        forward (or backward) to after it. The first hold gathers, the last release reshards, and hooks in between free
        nothing. Hooks count as one more holder.

        Returns:
            The hold. Call `wait()` before the parameters are used, and `release()` after; or use the hold in a `with`
            statement.

        Raises:
            RuntimeError: Parameters are on the meta device.

        Effects: as `unshard(async_op=True)`, if nobody holds the parameters yet.
        """
        return Hold(fresh_weights(self))

    @yields_to_model
    def reduce_gradients(self) -> None:
        """End this unit's backward: reduce its unsharded gradients into its sharded parameters; not for units below.

        Hooks do so at the end of the unit's backward; a schedule without hooks calls the method once after each
        backward of the unit. As after hooks, gradients are kept for a later microbatch if
        `set_requires_gradient_sync(False)` or, with ZeRO-1 and DDP, `set_is_last_backward(False)` was called. With
        delayed gradients (`delay_gradient`) everything happens when the last delayed gradient has come. Call it on a
        stream ordered after the streams of the gradients.

        Raises:
            RuntimeError: The unit has no gradients, or a hook is going to end this backward.

        Effects: collective on the unit's axis, on the reduce stream; the current stream waits for the unit reduced
            before, and `wait_for_gradients()` for the gradients. No host sync on CUDA.
        """
        state = state_of(self)
        state.tree.step_end.end_backward(state.unit, is_by_hand=True)

    @yields_to_model
    def wait_for_gradients(self) -> None:
        """End the backward of the whole tree if no hook ends it, and make the current stream wait for gradients.

        A schedule without hooks calls the method before the optimizer steps, and may call it after each
        microbatch too, with `set_is_last_backward(False)` before every microbatch but the last. Units with gradients
        are reduced, and units unsharded without a hold are resharded. After a backward that hooks ended, only
        late gradients are waited for (`overlap_optimizer`).

        Raises:
            RuntimeError: The unit is not the outermost; hooks are running a pass; or the last backward is over, and a
                hold was not released, or a delayed gradient has not come. The message names them.

        Effects: as `reduce_gradients` for gradients that are left; with the last backward the current stream waits for
            all reductions, and copies of the parameters are stale. No host sync on CUDA, unless shards rest on the CPU:
            then the host waits for their gradients.
        """
        outermost(self, "wait_for_gradients").tree.step_end.end_step()

    @yields_to_model
    def mark_updated(self) -> None:
        """Note a write to main weights of the whole tree by other code than a `torch.optim` optimizer.

        For example by swapping an average in, or by a copy through `.data`. Needed only for weights that outlive a
        pass: units that stay unsharded, and copies kept by `placements` (DDP, ZERO1, ZERO2, and HFSDP's shards in the
        compute dtype), and for delayed scales once an optimizer has stepped. All other weights are gathered anew each
        time.
        """
        for unit in state_of(self).tree.units:
            unit.weights.note_update()

    @yields_to_model  # type: ignore[prop-decorator]
    @property
    def sharding_options(self) -> ShardingOptions:
        """The options that count for this unit; fields of the tree are the outermost unit's."""
        return state_of(self).effective_options

    @yields_to_model
    def set_options(self, **changes: object) -> None:
        """Change the tree's fields of `sharding_options`, for all units of the tree.

            model.set_options(prefetch_budget=2 << 30, keep_budget=12 << 30)
            model.set_options(order_check=True)

        Args:
            changes: Names and new values, equal on every rank.

        Raises:
            RuntimeError: The unit is not the outermost.
            TypeError: A name is no field, or a value is of the wrong kind.
            ValueError: A field belongs to the unit, or a value is out of range.
        """
        tree = outermost(self, "set_options").tree
        tree.follow(tree.options.changed(changes))


def fresh_weights(module: object) -> UnitWeights:
    """A unit's weights, without unsharded parameters from before the last update: a verb may come between passes."""
    weights = state_of(module).unit.weights
    if weights.parameters.context.is_resting and not weights.num_holds:
        weights.drop_stale_weights()
    return weights


def outermost(module: object, method: str) -> FSDPState:
    state = state_of(module)
    if not state.unit.is_outermost:
        raise RuntimeError(
            f"Expected the outermost unit, got {state.unit.parameters.name!r}. Call {method}() on the module that "
            f"was given to the last fully_shard: {method} must be called on the root FSDP module."
        )
    return state
