"""The invariants of `fusion.rollout.orders`, against a plain sort of all waiting requests."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fusion.inference.config import ORDERS
from fusion.rollout import EngineRoom, RequestBuffer
from fusion.rollout.length_history import LengthHistory
from fusion.rollout.orders import find_order
from fusion.rollout.orders.context import SERVE_STARVED
from fusion.rollout.orders.history import HEDGE, OVERDUE, remaining
from fusion.rollout.orders.interface import Lengths, Order, OrderInputs
from fusion.rollout.orders.ranked import RankedOrder
from fusion.rollout.orders.stamped_heap import StampedHeap

MAX_TOKENS = 100
PLAIN_ORDERS = sorted({*ORDERS} - {"histopipe"})
"""Without the one that has a test of its own"""


def make_waiting(name, history):
    return find_order(name)(OrderInputs(history))


@dataclass(eq=False)
class Request:
    id: str
    group: str
    position: int
    member: int
    generated: int = 0


class PlainOrder:
    """Every take ranks all waiting requests."""

    def __init__(self, name):
        self.name, self.lengths, self.waiting, self.served, self.taken = name, {}, {}, {}, 0
        self.finished, self.hedges = {}, False

    def take(self):
        self.taken += 1
        requests = self.waiting.values()
        if self.name == "context" and self.taken % SERVE_STARVED == 0:
            chosen = min(requests, key=lambda one: (self.served.get(one.group, 0), one.position))
        else:
            chosen = min(requests, key=self.key)
        self.served[chosen.group] = self.taken
        return self.waiting.pop(chosen.id)

    def peek(self):
        """What `take` would return."""
        waiting, served, taken = dict(self.waiting), dict(self.served), self.taken
        chosen = self.take()
        self.waiting, self.served, self.taken = waiting, served, taken
        return chosen

    def key(self, one):
        fresh = self.name not in ("fifo", "oracle") and one.member and not one.generated
        return self.rank(one), one.position - one.member + 0.5 if fresh else one.position, one.position

    def rank(self, one):
        known, finished = self.lengths[one.group], self.finished.get(one.group, [])
        match "hedged" if self.hedges else self.name:
            case "hedged":
                return known.step, one.generated
            case "fifo":
                return 0
            case "least_generated":
                return one.generated
            case "context":
                longest = max(finished) if finished else MAX_TOKENS
                return (0, one.generated) if one.member == 0 else (1, -longest)
            case "history":
                pooled = [*known.earlier, *finished]
                estimate = sum(pooled) / len(pooled) if pooled else MAX_TOKENS
                if not pooled and one.member == 0:
                    return known.step, 0, one.generated
                return known.step, 1, -max(estimate - one.generated, OVERDUE * one.generated)
            case "oracle":
                return one.generated - known.exact[one.member]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(PLAIN_ORDERS), st.integers(1, 4), st.randoms(use_true_random=False))
def test_random_events_take_what_a_plain_sort_takes_and_each_request_once(name, group_size, random):
    history = LengthHistory()
    waiting, plain = make_waiting(name, history), PlainOrder(name)
    running, groups = {}, {}
    for step in range(150):
        match random.choice(["add", "take", "take", "take", "put back", "return", "finish", "discard"]):
            case "add":
                group, exact = f"g{step}", [random.randint(1, MAX_TOKENS) for _ in range(group_size)]
                earlier = [random.randint(1, MAX_TOKENS) for _ in range(random.choice([0, group_size]))]
                if random.random() < 0.1:
                    history.observe(0, "r", [1, 1, 1, random.choice([1, 10])] * 300)
                    history.end_step()
                step_number = random.randint(step // 50, step // 50 + 1)
                waiting.add_group(group, Lengths(MAX_TOKENS, earlier, exact, step_number))
                plain.hedges = name == "history" and history.runaway_share >= HEDGE[plain.hedges]
                plain.lengths[group] = Lengths(MAX_TOKENS, earlier, exact, step_number)
                requests = [Request(f"{group}/{k}", group, step * 10 + k, k) for k in range(group_size)]
                groups[group] = {one.id for one in requests}
                waiting.add(requests)
                plain.waiting |= {one.id: one for one in requests}
            case "take":
                if not plain.waiting:
                    assert waiting.take() is None
                    continue
                taken = waiting.take()
                assert taken is plain.take()
                assert taken.id not in running
                running[taken.id] = taken
            case "put back" if plain.waiting:
                taken = waiting.take()
                waiting.put_back(taken)
                assert taken is plain.peek()
            case "return" if running:
                one = running.pop(random.choice(sorted(running)))
                one.generated += random.randint(0, 20)
                waiting.add([one])
                plain.waiting[one.id] = one
            case "finish" if running:
                one = running.pop(random.choice(sorted(running)))
                tokens = one.generated + random.randint(1, 20)
                groups[one.group].discard(one.id)
                waiting.observe_finished(one.group, tokens)
                plain.finished.setdefault(one.group, []).append(tokens)
            case "discard":
                for group in [name for name, ids in groups.items() if not ids & running.keys()][:1]:
                    left = [one for one in plain.waiting.values() if one.group == group]
                    waiting.discard(group, left)
                    for one in left:
                        del plain.waiting[one.id]
                    del groups[group], plain.lengths[group]
                    plain.served.pop(group, None)
        assert len(waiting) == len(plain.waiting)
        if name == "context":
            assert not waiting._served.keys() - groups.keys(), "nothing of an ended group stays"


def test_every_order_is_found_by_its_name():
    assert len({find_order(name) for name in ORDERS}) == len(ORDERS)


class LongestPrompt(RankedOrder):
    """An order of one's own."""

    def rank(self, request, lengths):
        return (-len(request.id),)


def test_an_order_of_ones_own_is_found_by_module_and_class():
    name = f"{__name__}:LongestPrompt"
    assert find_order(name) is LongestPrompt
    buffer = RequestBuffer(order=name)
    for group in ("a", "bbb", "cc"):
        buffer.add(group, [group], prompt_tokens=1, max_tokens=5)
    (entries,) = buffer.dispatch([0], EngineRoom(9)).values()
    assert [entry.id for entry in entries] == ["bbb", "cc", "a"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:Order", "cannot be imported"),
        (f"{__name__}:NoSuchClass", "expected a subclass of"),
        (f"{__name__}:Request", "expected a subclass of"),
    ],
)
def test_what_is_no_order_is_refused(name, problem):
    with pytest.raises(ValueError, match=f"rollout.schedule.order={name}: {problem}"):
        find_order(name)


def test_an_order_without_its_methods_is_not_created():
    with pytest.raises(TypeError, match="abstract"):
        Order(OrderInputs(LengthHistory()))


def test_a_response_that_outgrows_its_estimate_is_taken_for_a_longer_one():
    assert remaining(100, 40) == 60
    assert remaining(100, 90) < remaining(100, 400) < remaining(100, 800)


def test_requests_that_are_all_taken_at_once_have_no_probes():
    waiting = make_waiting("history", LengthHistory())
    for number, (group, earlier) in enumerate({"new": [], "short": [5], "other": [], "long": [50]}.items()):
        waiting.add_group(group, Lengths(MAX_TOKENS, earlier=earlier))
        waiting.add([Request(f"{group}/{k}", group, 10 * number + k, k) for k in range(2)])
    taken = waiting.take_all(ranked=True)
    ids = ["new/0", "new/1", "other/0", "other/1", "long/0", "long/1", "short/0", "short/1"]
    assert [one.id for one in taken] == ids
    assert waiting.take() is None and waiting.take_all(ranked=True) == []
    waiting.add(taken)
    assert [one.position for one in waiting.take_all(ranked=False)] == [0, 1, 10, 11, 20, 21, 30, 31]
    assert len(waiting) == 0


def test_estimates_are_trusted_until_responses_run_away_and_again_when_they_do_not():
    history = LengthHistory()
    waiting = make_waiting("history", history)
    names = {"short": 5, "long": 50}
    for number, (name, length) in enumerate(names.items()):
        waiting.add_group(name, Lengths(MAX_TOKENS, earlier=[length] * 4))
        waiting.add([Request(name, name, number, 0, generated=number)])

    def first():
        waiting.add_group("other", Lengths(MAX_TOKENS))
        taken = waiting.take()
        waiting.put_back(taken)
        return taken.id

    assert first() == "long"
    history.observe(0, "r", [1] * 999 + [5] * 2)
    history.end_step()
    assert first() == "long", "two of a thousand are not many"
    history.observe(0, "r", [1] * 99 + [5] * 2)
    history.end_step()
    assert first() == "short", "the fewest tokens so far"
    history.observe(0, "r", [1] * 500)
    history.end_step()
    assert first() == "short", "which is not changed for a little fewer"
    history.observe(0, "r", [1] * 2000)
    history.end_step()
    assert first() == "long"


def test_probes_come_first_then_the_group_whose_finished_sibling_was_longest():
    waiting = make_waiting("context", LengthHistory())
    for number, group in enumerate("ab"):
        waiting.add_group(group, Lengths(MAX_TOKENS))
        waiting.add([Request(f"{group}/{k}", group, 10 * number + k, k) for k in range(3)])
    probes = [waiting.take(), waiting.take()]
    assert [one.id for one in probes] == ["a/0", "b/0"]
    for group, tokens in (("a", 5), ("b", 50)):
        waiting.observe_finished(group, tokens)
    assert [waiting.take().id for _ in range(4)] == ["b/1", "b/2", "a/1", "a/2"]


def test_a_starved_group_that_finds_no_room_is_next_until_it_does():
    """A take that is undone serves nobody: else a group of long requests would lose its turn each time."""
    waiting = make_waiting("context", LengthHistory())
    for number, group in enumerate("ab"):
        waiting.add_group(group, Lengths(MAX_TOKENS))
        waiting.observe_finished(group, 50 - number)
        waiting.add([Request(f"{group}/{k}", group, 100 * number + k, k) for k in range(1, 50)])
    for _ in range(SERVE_STARVED - 1):
        assert waiting.take().group == "a"
    for _ in range(3):
        starved = waiting.take()
        assert starved.group == "b"
        waiting.put_back(starved)
    assert waiting.take() is starved and waiting.take().group == "a"


@pytest.mark.parametrize("name", sorted({*PLAIN_ORDERS} - {"fifo"}))
def test_stale_items_do_not_accumulate(name):
    waiting = make_waiting(name, LengthHistory())
    waiting.add_group("g", Lengths(MAX_TOKENS, exact=[50] * 100))
    requests = [Request(f"g/{k}", "g", k, k) for k in range(100)]
    waiting.add(requests)
    for step in range(3000):
        taken = waiting.take()
        taken.generated += 1
        waiting.add([taken])
        waiting.observe_finished("g", step)
    heaps = [heap for heap in vars(waiting).values() if isinstance(heap, StampedHeap)]
    assert heaps and all(len(heap._items) <= 2 * 100 + 64 for heap in heaps)
