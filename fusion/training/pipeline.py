"""What each stage of a pipeline does when, and what travels between stages: pure arithmetic.

1F1B (PipeDream-Flush, arXiv 2006.09503, section 2.2): a stage runs ahead by as many forward passes as there are stages
behind it, then alternates, then drains. Four micro-batches over three stages (F forward, B backward):

    stage 0   F0 F1 F2 ·  ·  B0 F3 B1 ·  B2 ·  B3
    stage 1   ·  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3
    stage 2   ·  ·  F0 B0 F1 B1 F2 B2 F3 B3

Invariants of `one_forward_one_backward`: every micro-batch goes forward once and backward once on each stage, in order,
backward after forward; a stage keeps the activations of at most ``stages - stage`` micro-batches, the last of one. With
one stage it is forward, backward, forward, backward.

Invariants of `program`: an action follows the message that brings its input; what an action yields leaves before the
next action; both ends name the same messages in the same order. The messages before an action are one batch, which is
complete when each of them is, so that two neighbours may send to each other without buffers (rendezvous): no deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One pass of a micro-batch through a stage."""

    forward: bool
    micro_batch: int


@dataclass(frozen=True)
class Message:
    """Hidden states to the stage after (``forward``), or their gradient to the stage before."""

    forward: bool
    micro_batch: int
    source: int
    target: int


@dataclass(frozen=True)
class Step:
    """Messages that travel at once, then an action; the last step of a program may have none."""

    messages: tuple[Message, ...]
    action: Action | None


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The actions of a stage in order (invariants above)."""
    ahead = min(stages - 1 - stage, micro_batches)
    actions = [Action(True, i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        actions += [Action(True, i), Action(False, i - ahead)]
    return actions + [Action(False, i) for i in range(micro_batches - ahead, micro_batches)]


def forward_only(micro_batches: int) -> list[Action]:
    return [Action(True, i) for i in range(micro_batches)]


def program(actions: Sequence[Action], stage: int, stages: int) -> list[Step]:
    """The actions of a stage with the messages between them (invariants above)."""
    steps: list[Step] = []
    leaving: tuple[Message, ...] = ()
    for action in actions:
        steps.append(Step(leaving + _input(action, stage, stages), action))
        leaving = _output(action, stage, stages)
    return [*steps, Step(leaving, None)] if leaving else steps


def _input(action: Action, stage: int, stages: int) -> tuple[Message, ...]:
    source = stage - 1 if action.forward else stage + 1
    return (Message(action.forward, action.micro_batch, source, stage),) if 0 <= source < stages else ()


def _output(action: Action, stage: int, stages: int) -> tuple[Message, ...]:
    target = stage + 1 if action.forward else stage - 1
    return (Message(action.forward, action.micro_batch, stage, target),) if 0 <= target < stages else ()
