"""Run one rank's stage of the pipeline, according to its program (`pipeline`).

    hidden_nD of the previous stage ─► forward ─► hidden_nD to the next stage       same TP and DP coordinate,
    its gradient to the previous stage ◄─ backward ◄─ its gradient                  this TP rank's rows

All ranks of a replica read the same batch, so sender and receiver know every shape in advance; a message without rows
is not sent. After a stage's output was sent, only its edge in the autograd graph is kept. A model with a single stage
runs the same code and sends nothing."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusion.npu.failures import wait_for
from fusion.training.model import TrainedModel
from fusion.training.pipeline import Pass, PipelineStep, forward_only, one_forward_one_backward, program

Forward = Callable[[int, torch.Tensor | None], tuple[torch.Tensor | None, torch.Tensor | None]]
"""(micro-batch, hidden states [n, D] of the previous stage, None on the first) → (hidden states [n, D] for the next
stage, None on the last; scalar that this stage adds to the loss, or None)."""


class _Pending(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    hidden: torch.Tensor | None
    output: GradientEdge | None
    loss: torch.Tensor | None


class PipelineStage:
    """Run the micro-batches of a batch through this rank's part of ``model``. Construction and all calls are
    collective over the mesh."""

    def __init__(self, model: TrainedModel):
        self.model, self.mesh = model, model.mesh
        if self.mesh.pp_group is not None:
            # NCCL and HCCL require a collective of the whole group before batched messages between some of its ranks
            dist.all_reduce(torch.zeros(1, device=model.device.torch_device), group=self.mesh.pp_group)

    def train(self, rows: Sequence[int], forward: Forward) -> None:
        """Run forward and backward passes (1F1B) of micro-batches of ``rows`` each; gradients accumulate in the
        leaves."""
        stages = self.mesh.parallel.pp
        self._run(one_forward_one_backward(self.mesh.pp_rank, stages, len(rows)), rows, forward, backward=True)

    @torch.no_grad()
    def infer(self, rows: Sequence[int], forward: Forward) -> None:
        """Run forward passes only; ``forward`` keeps what it needs of the last stage's output."""
        self._run(forward_only(len(rows)), rows, forward, backward=False)

    def _run(self, actions: list[Pass], rows: Sequence[int], forward: Forward, backward: bool) -> None:
        pending: dict[int, _Pending] = {}
        mail: dict[tuple[bool, int], torch.Tensor] = {}
        for step in program(actions, self.mesh.pp_rank, self.mesh.parallel.pp):
            self._exchange(step, rows, mail)
            match step.action:
                case Pass(True, i):
                    hidden = mail.pop((True, i), None)
                    if hidden is not None:
                        hidden.requires_grad_(backward)
                    output, loss = forward(i, hidden)
                    if backward:
                        pending[i] = _Pending(hidden, _edge_of(output), loss)
                    if output is not None:
                        mail[True, i] = output.detach()
                case Pass(False, i):
                    gradient = _backward(pending.pop(i), mail.pop((False, i), None))
                    if gradient is not None:
                        mail[False, i] = gradient
        assert not pending and not mail

    def _exchange(self, step: PipelineStep, rows: Sequence[int], mail: dict[tuple[bool, int], torch.Tensor]) -> None:
        """Send the step's outgoing messages from ``mail`` and receive its incoming ones into ``mail``."""
        operations, sent = [], []
        for message in step.messages:
            key = message.forward, message.micro_batch
            outgoing = message.source == self.mesh.pp_rank
            if outgoing:
                tensor = mail.pop(key).contiguous()
                sent.append(tensor)
            else:
                tensor = mail[key] = self._empty(rows[message.micro_batch])
            if tensor.numel():
                call, peer = (dist.isend, message.target) if outgoing else (dist.irecv, message.source)
                operations.append(dist.P2POp(call, tensor, group=self.mesh.pp_group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            wait_for(work)

    def _empty(self, rows: int) -> torch.Tensor:
        shape = self.model.hidden_rows(rows), self.model.config.hidden_size
        return torch.empty(shape, dtype=self.model.weights.dtype, device=self.model.device.torch_device)


def _edge_of(value: torch.Tensor | None) -> GradientEdge | None:
    """Return where the backward pass of a value begins; None: nothing before it has a gradient, as on a first stage
    whose layers are frozen and have no adapters."""
    return get_gradient_edge(value) if value is not None and value.requires_grad else None


def _backward(pending: _Pending, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Run the backward pass and return the gradient of the stage's input."""
    edges, gradients = [], []
    if pending.output is not None:
        edges.append(pending.output)
        gradients.append(gradient)
    if pending.loss is not None and (edge := _edge_of(pending.loss)):
        edges.append(edge)
        gradients.append(torch.ones_like(pending.loss))
    if edges:
        torch.autograd.backward(edges, gradients)
    return None if pending.hidden is None else pending.hidden.grad
