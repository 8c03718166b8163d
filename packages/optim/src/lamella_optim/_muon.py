"""Muon for the matrices of layers and AdamW for all other parameters, as one optimizer over shards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed import ProcessGroup
from torch.optim import AdamW, Muon, Optimizer
from torch.optim._muon import muon

from lamella_engine.extending import local_of
from lamella_optim._cut_matrices import MatrixExchange
from lamella_optim._matrix_shares import MatrixUpdate, group_of, is_cut

_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")


class OwnerMuon(Muon):
    """torch's Muon over shards: a matrix on one rank is stepped by the rank, a matrix on several by one of the ranks.

    The ranks exchange shared matrices (`_cut_matrices`), each rank with a share of the work. Three kinds of parameters:
    - a matrix;
    - a stack of matrices (three dims or more), such as experts; a rank has any number of the matrices;
    - a matrix of several parts, their rows in turns, such as queries, keys and values. Each part is a separate matrix
      for orthogonalisation and scale; the momentum lies as the matrix of all.

    Args:
        params: Parameters or param groups.
        rows: Makes all parameters matrices of several parts: the number of rows of each part in a turn.
        options: Options of `torch.optim.Muon`.

    Raises:
        ValueError: A parameter is a vector, or has no whole number of turns; or an option is not Muon's.
    """

    state_slots: Final = ("momentum_buffer",)
    """Names of a stepped parameter's state, for checkpoints."""

    def __init__(self, params: Any, *, rows: tuple[int, ...] = (), **options: Any) -> None:
        defaults = Muon([torch.nn.Parameter(torch.empty(1, 1))], **options).defaults
        Optimizer.__init__(self, params, defaults)  # Muon's own constructor refuses stacks.
        # No option of the groups: a loaded state dict or checkpoint would bring the rows of another construction.
        self._rows = rows
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            shape = tuple(parameter.shape)
            if parameter.ndim < 2:
                raise ValueError(f"Expected matrices or stacks of matrices for Muon, got a shape of {shape}.")
            if rows and (parameter.ndim > 2 or min(rows) < 1 or shape[0] % sum(rows)):
                raise ValueError(
                    f"Expected the rows in `fused` to divide their matrix into turns of {' + '.join(map(str, rows))} "
                    f"rows, got a parameter of shape {shape}. Give the rows of each part in one turn, or leave the "
                    "parameter out of `fused`."
                )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # `MuonAndAdam` has the closure
        """Step all matrices of the rank, and the rank's parts of shared matrices.

        Effects: for shared matrices as `MatrixExchange`: two all-to-alls a round, and with the first step maybe a
            new process group; gradients must be present on all their ranks alike. Else no collective. No host sync.
        """
        cut: list[MatrixUpdate] = []
        for group in self.param_groups:
            options = {name: group[name] for name in _OPTIONS}
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if "momentum_buffer" not in state:  # On ranks without rows too: state is alike on all ranks.
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                tensors = (parameter, parameter.grad, state["momentum_buffer"])
                if is_cut(parameter):
                    cut.append(MatrixUpdate(*tensors, options, self._rows))
                elif not local_of(parameter).numel():
                    continue
                elif self._rows:
                    _step_in_turns([local_of(tensor) for tensor in tensors], self._rows, options)
                else:
                    _step_matrices([local_of(tensor) for tensor in tensors], options)
        if cut:
            self._step_cut(cut)

    def _step_cut(self, updates: Sequence[MatrixUpdate]) -> None:
        """Step shared matrices, by the sets of ranks."""
        # Past `Optimizer.__getstate__`, and so past copies and pickles: a group cannot be copied.
        exchanges: dict[Hashable, MatrixExchange] = vars(self).setdefault("_exchanges", {})
        by_group: dict[ProcessGroup, list[MatrixUpdate]] = {}
        for update in updates:
            by_group.setdefault(group_of(update.parameter), []).append(update)
        for group, members in by_group.items():
            key = group, tuple(update.kind for update in members)
            if key not in exchanges:
                exchanges[key] = MatrixExchange(members)
            exchanges[key].step(members)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rows": self._rows}


def _step_matrices(tensors: Sequence[torch.Tensor], options: Mapping[str, Any]) -> None:
    """Step a matrix, or each matrix of a stack.

    Args:
        tensors: The local weight, gradient and momentum, (..., num_rows, width).
        options: The options of torch's function.
    """
    weights, gradients, momenta = ([*tensor.view(-1, *tensor.shape[-2:])] for tensor in tensors)
    muon(weights, gradients, momenta, **options, has_complex=False)


def _step_in_turns(tensors: Sequence[torch.Tensor], rows: Sequence[int], options: Mapping[str, Any]) -> None:
    """Step the parts of a matrix, on copies: torch's Muon takes matrices, and a part's rows lie apart."""
    width = tensors[0].shape[1]
    turns = [torch.split(tensor.view(-1, sum(rows), width), list(rows), 1) for tensor in tensors]
    for parts in zip(*turns, strict=True):
        weight, gradient, momentum = (
            part.clone(memory_format=torch.contiguous_format).view(-1, width) for part in parts
        )
        muon([weight], [gradient], [momentum], **options, has_complex=False)
        parts[0].copy_(weight.view_as(parts[0]))
        parts[2].copy_(momentum.view_as(parts[2]))


class MuonAndAdam(Optimizer):
    """Muon for matrices, torch's AdamW for all other parameters, as one optimizer.

        names = {name for name, parameter in model.layers.named_parameters() if parameter.ndim == 2}
        matrices = {parameter for name, parameter in model.layers.named_parameters() if name in names}
        optimizer = MuonAndAdam(
            [{"params": model.parameters()}],
            is_matrix=matrices.__contains__,
            muon={"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"},
            adam={"lr": 1e-3},
        )

    Tables of embeddings and output layers are not for Muon, in spite of two dims. Shards may lie anyhow. Matrices
    shared by ranks, evenly or by tensor parallelism, are exchanged: each is orthogonalised on one rank, with the work
    balanced over the ranks, for two all-to-alls of 2 bytes an element. Matrices whole on one rank (`Whole()` from
    `keep_together` of `lamella_engine.ShardingOptions`), and stacks cut between their matrices, are stepped in place,
    without a collective. All ranks take the steps of torch.optim.Muon on a single rank.

    Args:
        groups: Parameter groups; each is divided into a group for either optimizer.
        is_matrix: True for the parameters of Muon.
        muon: Options of `torch.optim.Muon`.
        adam: Options of `torch.optim.AdamW`.
        fused: Matrices of several parts, as for `OwnerMuon`, and the rows of each part in a turn.

    Raises:
        ValueError: `is_matrix` chose a vector, or not a parameter of `fused`; or rows do not divide a fused matrix.

    Attributes:
        parts: The optimizers, each over separate groups, with the state of all.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        is_matrix: Callable[[torch.Tensor], bool],
        muon: dict[str, Any],
        adam: dict[str, Any],
        fused: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        groups = [{**group, "params": list(group["params"])} for group in groups]
        rows = fused or {}
        for parameter in rows:
            if not is_matrix(parameter):
                raise ValueError(
                    "Expected `is_matrix` to choose every parameter of `fused`, for Muon, got a parameter of shape "
                    f"{tuple(parameter.shape)} that it left to AdamW. Leave the parameter out of `fused`, or choose it."
                )
        self.parts: list[Optimizer] = []
        self._add(OwnerMuon, groups, lambda p: is_matrix(p) and p not in rows, muon)
        for turn in dict.fromkeys(rows.values()):
            fused_alike = {parameter for parameter, parameter_rows in rows.items() if parameter_rows == turn}
            self._add(OwnerMuon, groups, fused_alike.__contains__, {**muon, "rows": turn})
        self._add(AdamW, groups, lambda p: not is_matrix(p), adam)
        # A checkpoint tells optimizers apart by the names of their defaults.
        groups = [{"params": group["params"]} for part in self.parts for group in part.param_groups]
        super().__init__(groups, {"muon": muon, "adam": adam})
        # One dict a group and one state for all: learning rates are set here, and a state dict covers both.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self._share()

    def _add(
        self,
        kind: Callable[..., Optimizer],
        groups: Iterable[dict[str, Any]],
        chooses: Callable[[torch.Tensor], bool],
        options: dict[str, Any],
    ) -> None:
        """Add an optimizer of the chosen parameters, if any."""
        chosen = [{**group, "params": list(filter(chooses, group["params"]))} for group in groups]
        if chosen := [group for group in chosen if group["params"]]:
            self.parts.append(kind(chosen, **options))

    def _share(self) -> None:
        """Let the parts step on the whole optimizer's groups and state."""
        begin = 0
        for part in self.parts:
            end = begin + len(part.param_groups)
            part.__setstate__({"state": self.state, "param_groups": self.param_groups[begin:end]})
            begin = end

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As a part of construction; groups are divided between the parts then.

        Raises:
            NotImplementedError: The optimizer is built: no part would step the group.
        """
        if self.param_groups and self.param_groups[0] is self.parts[0].param_groups[0]:
            raise NotImplementedError(
                "Expected all parameters of MuonAndAdam in the `groups` of its construction, got a further group, "
                "which neither of its optimizers would step. Build another MuonAndAdam with all groups."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step by all parts.

        Args:
            closure: Makes the gradients anew.

        Returns:
            The closure's result.

        Effects: for shared matrices, two all-to-alls of about 256 MiB a rank and round; else no collective.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # Every load brings new groups and a new state.
        self._share()
