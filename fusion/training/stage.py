"""One rank's stage of the pipeline at work: it follows its program, which is pure (`pipeline`).

    hidden_nD of the stage before ─► forward ─► hidden_nD to the stage after        the same TP and DP coordinate,
       its gradient to the stage before ◄─ backward ◄─ its gradient                 this TP rank's rows

All ranks of a replica read the same batch, so both ends know every shape beforehand; a message without rows is not
sent. Once a stage's output has left, only its place in the autograd graph is kept. A model without stages goes the same
way: nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusion.model import Transformer
from fusion.npu.failures import wait_for
from fusion.training.pipeline import Action, Message, Step, forward_only, one_forward_one_backward, program

Forward = Callable[[int, torch.Tensor | None], tuple[torch.Tensor | None, torch.Tensor | None]]
"""(micro-batch, hidden states [n, D] of the stage before, None on the first) → (hidden states [n, D] for the stage
after, None on the last; scalar that this stage itself adds to what is minimised, or None)."""


class _Alive(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    hidden: torch.Tensor | None
    output: GradientEdge | None
    objective: torch.Tensor | None


class Stage:
    """Runs the micro-batches of a batch through this rank's part of ``model``. Made by all ranks of the mesh at once,
    as every call is."""

    def __init__(self, model: Transformer):
        self.model, self.mesh = model, model.mesh
        if self.mesh.pp_group is not None:
            # NCCL and HCCL want a collective of the whole group before they batch messages between some of it
            dist.all_reduce(torch.zeros(1, device=model.device.torch_device), group=self.mesh.pp_group)

    def train(self, rows: Sequence[int], forward: Forward) -> None:
        """Runs forward and backward passes of micro-batches of ``rows`` each, 1F1B; gradients add up in the leaves."""
        stages = self.mesh.parallel.pp
        self._run(one_forward_one_backward(self.mesh.pp_rank, stages, len(rows)), rows, forward, backward=True)

    @torch.no_grad()
    def infer(self, rows: Sequence[int], forward: Forward) -> None:
        """Runs forward passes only; ``forward`` keeps what it needs of the last stage's output."""
        self._run(forward_only(len(rows)), rows, forward, backward=False)

    def _run(self, actions: list[Action], rows: Sequence[int], forward: Forward, backward: bool) -> None:
        alive: dict[int, _Alive] = {}
        mail: dict[tuple[bool, int], torch.Tensor] = {}
        for step in program(actions, self.mesh.pp_rank, self.mesh.parallel.pp):
            self._exchange(step, rows, mail)
            match step.action:
                case Action(True, i):
                    hidden = mail.pop((True, i), None)
                    if hidden is not None:
                        hidden.requires_grad_(backward)
                    output, objective = forward(i, hidden)
                    if backward:
                        alive[i] = _Alive(hidden, None if output is None else get_gradient_edge(output), objective)
                    if output is not None:
                        mail[True, i] = output.detach()
                case Action(False, i):
                    gradient = _backward(alive.pop(i), mail.pop((False, i), None))
                    if gradient is not None:
                        mail[False, i] = gradient
        assert not alive and not mail

    def _exchange(self, step: Step, rows: Sequence[int], mail: dict[tuple[bool, int], torch.Tensor]) -> None:
        """Sends what the step sends, out of ``mail``, and receives what it receives, into it."""
        operations, sent = [], []
        for message in step.messages:
            key = message.forward, message.micro_batch
            leaves = message.source == self.mesh.pp_rank
            if leaves:
                tensor = mail.pop(key).contiguous()
                sent.append(tensor)
            else:
                tensor = mail[key] = self._empty(rows[message.micro_batch])
            if tensor.numel():
                operations.append(self._operation(message, leaves, tensor))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            wait_for(work)

    def _operation(self, message: Message, leaves: bool, tensor: torch.Tensor) -> dist.P2POp:
        way, peer = (dist.isend, message.target) if leaves else (dist.irecv, message.source)
        return dist.P2POp(way, tensor, group=self.mesh.pp_group, group_peer=peer)

    def _empty(self, rows: int) -> torch.Tensor:
        shape = self.model.hidden_rows(rows), self.model.config.hidden_size
        return torch.empty(shape, dtype=self.model.weights.dtype, device=self.model.device.torch_device)


def _backward(alive: _Alive, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the gradient of the hidden states that came in."""
    edges, gradients = [], []
    if alive.output is not None:
        edges.append(alive.output)
        gradients.append(gradient)
    if alive.objective is not None:
        edges.append(get_gradient_edge(alive.objective))
        gradients.append(torch.ones_like(alive.objective))
    torch.autograd.backward(edges, gradients)
    return None if alive.hidden is None else alive.hidden.grad
