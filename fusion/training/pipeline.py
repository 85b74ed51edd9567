"""Schedule the passes of each pipeline stage and the messages between stages. Pure.

1F1B (PipeDream-Flush, arXiv 2006.09503, section 2.2): a stage starts with as many forward passes as there are stages
after it, then alternates forward and backward, then runs the remaining backward passes. Four micro-batches over three
stages (F forward, B backward):

    stage 0   F0 F1 F2 ·  ·  B0 F3 B1 ·  B2 ·  B3
    stage 1   ·  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3
    stage 2   ·  ·  F0 B0 F1 B1 F2 B2 F3 B3

Invariants of `one_forward_one_backward`: every micro-batch runs one forward and one backward pass on each stage, in
order, backward after forward; a stage keeps the activations of at most ``stages - stage`` micro-batches, the last stage
those of one. With a single stage forward and backward passes alternate.

Invariants of `program`: an action runs after the message with its input; its output is sent before the next action;
sender and receiver list the same messages in the same order. The messages before an action are one batch, which is
complete when all of them are, so that two neighbours can send to each other without buffers (rendezvous) and without a
deadlock."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch through a stage."""

    forward: bool
    micro_batch: int


@dataclass(frozen=True)
class PipelineMessage:
    """Hidden states sent to the next stage (``forward``), or their gradient sent to the previous one."""

    forward: bool
    micro_batch: int
    source: int
    target: int


@dataclass(frozen=True)
class PipelineStep:
    """Messages that are sent and received at once, then an action; the last step of a program may have no action."""

    messages: tuple[PipelineMessage, ...]
    action: Pass | None


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return the actions of a stage in order (invariants above)."""
    ahead = min(stages - 1 - stage, micro_batches)
    actions = [Pass(True, i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        actions += [Pass(True, i), Pass(False, i - ahead)]
    return actions + [Pass(False, i) for i in range(micro_batches - ahead, micro_batches)]


def forward_only(micro_batches: int) -> list[Pass]:
    return [Pass(True, i) for i in range(micro_batches)]


def program(actions: Sequence[Pass], stage: int, stages: int) -> list[PipelineStep]:
    """Return the actions of a stage with the messages between them (invariants above)."""
    steps: list[PipelineStep] = []
    outgoing: tuple[PipelineMessage, ...] = ()
    for action in actions:
        before, after = (stage - 1, stage + 1) if action.forward else (stage + 1, stage - 1)
        steps.append(PipelineStep(outgoing + _message(action, before, stage, stages), action))
        outgoing = _message(action, stage, after, stages)
    return [*steps, PipelineStep(outgoing, None)] if outgoing else steps


def _message(action: Pass, source: int, target: int, stages: int) -> tuple[PipelineMessage, ...]:
    message = PipelineMessage(action.forward, action.micro_batch, source=source, target=target)
    return (message,) if 0 <= source < stages and 0 <= target < stages else ()
