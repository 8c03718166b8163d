"""Muon over matrices shared by ranks: each is orthogonalised on one rank, and the work is balanced over the ranks.

    shards of an update   to the matrix's rank     all-to-all, 2 bytes an element
    matrix                orthogonalised there     torch's Newton-Schulz iteration, as for a matrix on a single rank
    its shards            back to their ranks      all-to-all, 2 bytes an element
    weight, momentum      stepped by each rank on its shard

Note [Wire of updates]
    torch's iteration begins with a cast to bf16, and the result is bf16: exchanges carry bf16, and nothing is lost.

The matrices of a round, their ranks and their order are in `_matrix_shares`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.optim._muon as torchs_muon

from lamella_engine.extending import local_of
from lamella_optim._matrix_shares import (
    CutMatrix,
    MatrixPiece,
    MatrixUpdate,
    balanced,
    group_of,
    matrices_of,
    on_device,
)

WIRE_DTYPE = torch.bfloat16  # Note [Wire of updates]


class MatrixExchange:
    """The exchange of matrices over a set of ranks.

    Args:
        updates: The parameters shared by the ranks; alike on all ranks.

    Effects: for parameters cut along several axes, the first object of a process creates a process group, a collective
        on the set of ranks.

    Attributes:
        loads: Multiplications of each rank a step and iteration.
    """

    def __init__(self, updates: Sequence[MatrixUpdate]) -> None:
        self._group = group_of(updates[0].parameter)
        self._device = _device_for(self._group, local_of(updates[0].parameter).device)
        matrices = [matrix for i, update in enumerate(updates) for matrix in matrices_of(i, update, self._device)]
        self._rounds, self.loads = balanced(matrices, self._group.size())

    def step(self, updates: Sequence[MatrixUpdate]) -> None:
        """Step the parameters.

        Args:
            updates: The step's updates of the parameters from construction, in their order.

        Effects: two all-to-alls a round; no host sync, unless shards rest on a device not served by the group.
        """
        shards = [_step_momentum(update) for update in updates]
        for update in updates:
            local_of(update.parameter).mul_(1 - update.options["lr"] * update.options["weight_decay"])
        for matrices in self._rounds:
            self._step_round(updates, shards, matrices)

    def _step_round(
        self, updates: Sequence[MatrixUpdate], shards: Sequence[torch.Tensor], matrices: Sequence[CutMatrix]
    ) -> None:
        rank, ranks = self._group.rank(), range(self._group.size())
        owned = [matrix for matrix in matrices if matrix.owner == rank]
        away = sorted(matrices, key=lambda matrix: matrix.owner)  # stable: an owner's keep the round's order
        sent = [0 for _ in ranks]
        for matrix in matrices:
            sent[matrix.owner] += matrix.numel_on(rank)
        received = [sum(m.numel_on(source) for m in owned) for source in ranks]
        parts = [_part(shards[m.index], piece) for m in away if (piece := m.pieces[rank])]
        flat = self._all_to_all(parts, sent, received)
        outputs = _orthogonalised(flat, received, owned, updates)
        parts = [
            output[piece.elements].flatten()
            for source in ranks
            for matrix, output in zip(owned, outputs, strict=True)
            if (piece := matrix.pieces[source])
        ]
        flat = self._all_to_all(parts, received, sent)
        for matrix, part in zip(away, torch.split(flat, [matrix.numel_on(rank) for matrix in away]), strict=True):
            if (piece := matrix.pieces[rank]) is not None:
                _add(updates[matrix.index], matrix, piece, part)

    def _all_to_all(self, parts: Iterable[torch.Tensor], sent: list[int], received: list[int]) -> torch.Tensor:
        flat = [part.to(self._device, WIRE_DTYPE) for part in parts]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=WIRE_DTYPE, device=self._device)
        incoming = outgoing.new_empty(sum(received))
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self._group)
        return incoming


def _device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device of exchanges: the shards' own, or a device served by the group (shards may rest on the CPU)."""
    served = group._device_types
    if any(other.type == device.type for other in served):
        return device
    return torch.device(served[0].type, torch.get_device_module(served[0]).current_device())


def _step_momentum(update: MatrixUpdate) -> torch.Tensor:
    """Step the local momentum; the local update, as in torch's Muon."""
    gradient, momentum = local_of(update.gradient), local_of(update.momentum)
    momentum.lerp_(gradient, 1 - update.options["momentum"])
    return gradient.lerp(momentum, update.options["momentum"]) if update.options["nesterov"] else momentum


def _part(shard: torch.Tensor, piece: MatrixPiece) -> torch.Tensor:
    matrix = shard.view(-1, *shard.shape[-2:])[piece.place]
    return matrix[on_device(piece.local_rows, shard.device)].flatten()


def _orthogonalised(
    flat: torch.Tensor, received: Sequence[int], owned: Sequence[CutMatrix], updates: Sequence[MatrixUpdate]
) -> list[torch.Tensor]:
    """The orthogonalised matrices of this rank.

    Args:
        flat: The ranks' parts: by rank, and by matrix.
        received: The elements of each rank.
        owned: The matrices.
        updates: The step's parameters.
    """
    by_rank = [
        iter(torch.split(part, [matrix.numel_on(source) for matrix in owned]) if owned else ())
        for source, part in enumerate(torch.split(flat, list(received)))
    ]
    outputs = []
    for matrix in owned:
        full_matrix = flat.new_empty(matrix.shape)
        for piece, parts in zip(matrix.pieces, by_rank, strict=True):
            part = next(parts)
            if piece is not None:
                full_matrix[piece.elements] = part.view(piece.shape)
        options = updates[matrix.index].options
        outputs.append(
            torchs_muon._zeropower_via_newtonschulz(
                full_matrix, options["ns_coefficients"], options["ns_steps"], options["eps"]
            )
        )
    return outputs


def _add(update: MatrixUpdate, matrix: CutMatrix, piece: MatrixPiece, part: torch.Tensor) -> None:
    """Add a rank's part of an orthogonalised matrix to the weight."""
    options, local = update.options, local_of(update.parameter)
    rate = torchs_muon._adjust_lr(options["lr"], options["adjust_lr_fn"], torch.Size(matrix.shape))
    rows = part.view(piece.shape).to(local.device)
    weight = local.view(-1, *local.shape[-2:])[piece.place]
    if piece.shape[0] == len(weight):
        weight.add_(rows, alpha=-rate)
    else:
        numbers = on_device(piece.local_rows, local.device)
        weight[numbers] = weight[numbers].add_(rows, alpha=-rate)
