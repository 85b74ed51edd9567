"""The invariants of `fusion.rollout.buffer`, under random engines."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fusion.rollout import RequestBuffer


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_random_engines_lose_and_repeat_nothing(engines, group_size, random):
    buffer, added, finished = RequestBuffer(), 0, []
    held: dict[str, int] = {}
    for step in range(80):
        match random.choice(["add", "dispatch", "suspend", "finish", "finish", "remove", "save"]):
            case "add":
                buffer.add(f"g{added}", [f"g{added}/{k}" for k in range(group_size)], random.randint(1, 9), 100)
                added += 1
            case "dispatch":
                waiting = {entry.id for entry in buffer.of("waiting")}
                found = buffer.dispatch(sorted(random.sample(range(engines), random.randint(1, engines))))
                given_ = {entry.id: engine for engine, entries in found.items() for entry in entries}
                assert set(given_) == waiting and not set(given_) & set(held)
                for entries in found.values():
                    for first, second in zip(entries, entries[1:], strict=False):
                        assert int(first.group[1:]) <= int(second.group[1:]), "the oldest group first"
                held |= given_
            case "suspend" if held:
                id = random.choice(sorted(held))
                generated = buffer.entries[id].generated + random.randint(0, 5)
                buffer.suspend(held.pop(id), id, generated, f"{id}~{generated}" if generated else "", (step, step))
            case "finish" if held:
                id = random.choice(sorted(held))
                del held[id]
                buffer.finish(id, 7)
                finished.append(id)
            case "remove":
                for group in [f"g{n}" for n in range(added) if f"g{n}" in buffer and buffer.is_finished(f"g{n}")]:
                    buffer.remove(group)
            case "save" if not held:
                again = RequestBuffer()
                again.load_state_dict(buffer.state_dict())
                assert again.state_dict() == buffer.state_dict()
                buffer = again
    states = {entry.id: entry.state for entry in buffer.entries.values()}
    assert {id for id, state in states.items() if state == "running"} == set(held)
    assert len(finished) == len(set(finished))
    assert all(states.get(id, "finished") == "finished" for id in finished)


def test_siblings_stay_together_and_the_least_loaded_engine_comes_first():
    buffer = RequestBuffer()
    buffer.add("a", ["a/0", "a/1"], 50, 10)
    assert [entry.id for entry in buffer.dispatch([0, 1])[0]] == ["a/0", "a/1"]
    buffer.add("b", ["b/0", "b/1"], 30, 10)
    buffer.add("c", ["c/0", "c/1"], 20, 10)
    found = buffer.dispatch([0, 1])
    assert [entry.id for entry in found[1]] == ["b/0", "b/1", "c/0", "c/1"] and not found[0]


def test_a_suspended_request_goes_on_elsewhere_with_what_it_has():
    buffer = RequestBuffer()
    buffer.add("a", ["a/0"], 5, 10)
    buffer.dispatch([3])
    buffer.suspend(3, "a/0", 4, "a/0~4", (1, 2))
    (entry,) = buffer.dispatch([7])[7]
    assert (entry.generated, entry.earlier, entry.oldest, entry.newest, entry.suspensions) == (4, "a/0~4", 1, 2, 1)
    with pytest.raises(AssertionError, match="had 4 tokens and has 3"):
        buffer.suspend(7, "a/0", 3, "a/0~3", None)
    buffer.finish("a/0", 9)
    assert buffer.is_finished("a") and [entry.id for entry in buffer.remove("a")] == ["a/0"]
