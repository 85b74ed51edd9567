from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fusion.training.pipeline import (
    Pass,
    PipelineMessage,
    PipelineStep,
    forward_only,
    one_forward_one_backward,
    program,
)

SHAPES = (st.integers(1, 7), st.integers(0, 12), st.booleans())


def plan(stages: int, micro_batches: int, train: bool) -> list[list[PipelineStep]]:
    actions = one_forward_one_backward if train else lambda stage, stages, count: forward_only(count)
    return [program(actions(stage, stages, micro_batches), stage, stages) for stage in range(stages)]


@given(*SHAPES)
def test_every_micro_batch_goes_forward_and_backward_once_and_few_are_alive(stages, micro_batches, train):
    for stage, steps in enumerate(plan(stages, micro_batches, train)):
        actions = [step.action for step in steps if step.action is not None]
        for forward in (True, False) if train else (True,):
            assert [a.micro_batch for a in actions if a.forward == forward] == list(range(micro_batches))
        alive: set[int] = set()
        for action in actions if train else ():
            (alive.add if action.forward else alive.remove)(action.micro_batch)
            assert len(alive) <= stages - stage
        assert not alive
        assert not any(step.action is None for step in steps[:-1])


@given(*SHAPES)
def test_rendezvous_sends_never_deadlock_and_bring_every_input_in_time(stages, micro_batches, train):
    """Every stage stands at a step until all of its messages meet their other ends, which are first in their lines."""
    programs = plan(stages, micro_batches, train)
    at = [0] * stages
    left = [list(steps[0].messages) if steps else [] for steps in programs]
    delivered: Counter[tuple[int, PipelineMessage]] = Counter()
    yielded: set[tuple[int, Pass]] = set()
    while any(at[stage] < len(programs[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            for message in list(left[stage]):
                peer = message.target if message.source == stage else message.source
                lines = [[m for m in left[end] if {m.source, m.target} == {stage, peer}] for end in (stage, peer)]
                same_way = [next((m for m in line if m.source == message.source), None) for line in lines]
                if same_way == [message, message]:
                    assert (message.source, Pass(message.forward, message.micro_batch)) in yielded
                    left[stage].remove(message)
                    left[peer].remove(message)
                    delivered[message.target, message] += 1
                    moved = True
            if at[stage] < len(programs[stage]) and not left[stage]:
                action = programs[stage][at[stage]].action
                if action is not None:
                    yielded.add((stage, action))
                    source = stage - 1 if action.forward else stage + 1
                    if 0 <= source < stages:
                        assert delivered[stage, PipelineMessage(action.forward, action.micro_batch, source, stage)] == 1
                at[stage] += 1
                if at[stage] < len(programs[stage]):
                    left[stage] = list(programs[stage][at[stage]].messages)
                moved = True
        assert moved, f"deadlock at {at}: {left}"
    passes = micro_batches * (2 if train else 1)
    assert len(yielded) == stages * passes
    assert sum(delivered.values()) == (stages - 1) * passes


def test_the_picture_in_the_docstring():
    wanted = ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    for stage, line in enumerate(wanted):
        actions = one_forward_one_backward(stage, 3, 4)
        assert " ".join(f"{'F' if a.forward else 'B'}{a.micro_batch}" for a in actions) == line
