"""The invariants of `fusion.rollout.orders.histopipe`, against a plain choice among all waiting requests."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from fusion.rollout import EngineRoom, RequestBuffer, SuspendedSample
from fusion.rollout.length_history import LengthHistory
from fusion.rollout.orders.histopipe import NO_CLASS, HistoPipeOrder, ascends
from fusion.rollout.orders.interface import Lengths, OrderInputs
from fusion.rollout.orders.length_classes import HistoPipeSpec

MAX_TOKENS, ENGINES, SIZE, GROUP = 100, 5, 2, 5


@dataclass(eq=False)
class Request:
    id: str
    group: str
    position: int
    generated: int = 0


def rank(waiting, one):
    """As documented, of a request whose group is ranked."""
    step = waiting._step_of[one.group]
    tokens = step.groups[one.group].tokens
    return step.number, tokens if ascends(step.number) else -tokens, one.position


def prefers(waiting, one, engine):
    step = waiting._step_of[one.group]
    number = NO_CLASS if step._class_of[one.id] is step._classes[NO_CLASS] else step.groups[one.group].number
    return number in (NO_CLASS, step.class_of_engine(engine))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_random_events_take_each_request_once_and_the_next_one_that_an_engine_prefers(classes, random):
    spec = HistoPipeSpec(ENGINES, 4, SIZE, num_classes=classes)
    waiting, there, running, groups = HistoPipeOrder(OrderInputs(LengthHistory(), spec)), {}, {}, {}
    for event in range(150):
        match random.choice(["add", "take", "take for", "take for", "put back", "return", "finish", "discard"]):
            case "add":
                group = f"g{event}"
                earlier = [random.randint(1, MAX_TOKENS) for _ in range(random.choice([0, SIZE]))]
                waiting.add_group(group, Lengths(MAX_TOKENS, earlier, step=event // 40))
                added = [Request(f"{group}/{k}", group, event * 10 + k) for k in range(SIZE)]
                groups[group] = {one.id for one in added}
                waiting.add(added)
                there |= {one.id: one for one in added}
            case "take":
                before = dict(there)
                taken = waiting.take()
                assert (taken is None) == (not before)
                if taken is not None:
                    assert taken is min(before.values(), key=lambda one: rank(waiting, one))
                    running[taken.id] = there.pop(taken.id)
            case "take for":
                engine = random.randrange(ENGINES)
                waiting._rank_new()
                able = [one for one in there.values() if prefers(waiting, one, engine)]
                taken = waiting.take_for(engine)
                assert taken is min(able, key=lambda one: rank(waiting, one), default=None)
                if taken is not None:
                    running[taken.id] = there.pop(taken.id)
            case "put back" if there:
                taken = waiting.take()
                waiting.put_back(taken)
                assert waiting.take() is taken
                waiting.put_back(taken)
            case "return" if running:
                one = running.pop(random.choice(sorted(running)))
                one.generated += random.randint(0, 60)
                waiting.add([one])
                there[one.id] = one
            case "finish" if running:
                one = running.pop(random.choice(sorted(running)))
                groups[one.group].discard(one.id)
                waiting.observe_finished(one.group, one.generated + 1)
            case "discard":
                for group in [name for name, ids in groups.items() if not ids & running.keys()][:1]:
                    left = [one for one in there.values() if one.group == group]
                    waiting.discard(group, left)
                    for one in left:
                        del there[one.id]
                    del groups[group]
        assert len(waiting) == len(there)
        assert {group for step in waiting._steps.values() for group in step.groups} == groups.keys()
    assert {one.id for one in waiting.take_all(ranked=True)} == there.keys() and not len(waiting)


def buffer_of(**changes):
    """Rows 0 to 7 had 10, 20, … 80 tokens; four engines."""
    spec = HistoPipeSpec(4, 100, GROUP, num_classes=2, search=False, **changes)
    buffer = RequestBuffer(order="histopipe", histopipe=spec)
    for row in range(8):
        buffer.history.observe(row, str(row), [10 * (row + 1)] * GROUP)
    buffer.history.end_step()
    return buffer


def add_step(buffer, step):
    for row in range(8):
        group = f"e{step}-{row}"
        buffer.add(group, [f"{group}/{k}" for k in range(GROUP)], 1, MAX_TOKENS, step=step)


def rows(entries):
    return [int(entry.group.split("-")[1]) for entry in entries]


def test_steps_run_in_turn_from_short_to_long_and_an_engine_has_the_other_end_in_the_next():
    buffer = buffer_of()
    add_step(buffer, 1)
    add_step(buffer, 2)
    by_engine = buffer.dispatch(range(4), EngineRoom(100))
    rows_of = {
        step: [rows([one for one in by_engine[engine] if one.step == step]) for engine in range(4)] for step in (1, 2)
    }
    assert all(max(found) < 4 for found in rows_of[1][:2]) and all(min(found) >= 4 for found in rows_of[1][2:])
    assert all(min(found) >= 4 for found in rows_of[2][:2]) and all(max(found) < 4 for found in rows_of[2][2:])
    assert all(found == sorted(found) for found in rows_of[1])
    assert all(found == sorted(found, reverse=True) for found in rows_of[2])


def test_what_the_engines_of_a_class_cannot_take_goes_to_the_others():
    buffer = buffer_of()
    add_step(buffer, 1)
    by_engine = buffer.dispatch([2, 3], EngineRoom(100))
    assert sorted(rows(by_engine[2] + by_engine[3])) == sorted([*range(8)] * GROUP)
    buffer = buffer_of()
    add_step(buffer, 1)
    assert [len(entries) for entries in buffer.dispatch(range(4), EngineRoom(3)).values()] == [3] * 4


def test_directions_and_classes_survive_a_resume():
    buffer, again = buffer_of(), buffer_of()
    add_step(buffer, 1)
    add_step(buffer, 2)
    again.load_state_dict(buffer.state_dict())
    assert again.state_dict() == buffer.state_dict()
    found = [
        {engine: [one.id for one in entries] for engine, entries in one.dispatch(range(4), EngineRoom(100)).items()}
        for one in (buffer, again)
    ]
    assert found[0] == found[1]


def test_only_an_outgrown_request_of_the_tail_leaves_its_engine_for_one_with_more_room():
    room = EngineRoom(100, 10_000, 10)
    for generated, in_tail, moves in ((40, True, False), (90, False, False), (90, True, True)):
        buffer = buffer_of(growth=1.5)
        add_step(buffer, 1)
        buffer.dispatch(range(4), room)
        one = buffer.entries["e1-3/0"]
        home = one.engine
        short = [entry.id for entry in buffer.of("running") if entry.group < "e1-4" and entry is not one]
        buffer.finish(dict.fromkeys(short if in_tail else short[:9], 5))
        buffer.add("e1-9", [f"x/{k}" for k in range(9)], 100, MAX_TOKENS, step=1)
        buffer.dispatch([home], room)
        buffer.suspend(home, SuspendedSample(one.id, generated, "r", (0, 0), kv_rank=0))
        (engine,) = [number for number, found in buffer.dispatch(range(4), room).items() if found]
        assert (engine != home) == moves
