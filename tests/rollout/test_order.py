"""The invariants of `fusion.rollout.order`, against a plain sort of all waiting requests."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fusion.inference.config import ORDERS
from fusion.rollout import order as order_module
from fusion.rollout.order import OVERDUE, SERVE_STARVED, Lengths, StampedHeap, make_waiting, remaining

MAX_TOKENS = 100


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

    def take(self):
        self.taken += 1
        requests = self.waiting.values()
        if self.name == "context" and self.taken % SERVE_STARVED == 0:
            chosen = min(requests, key=lambda one: (self.served.get(one.group, 0), one.position))
        else:
            chosen = min(requests, key=lambda one: (self.rank(one), one.position))
        self.served[chosen.group] = self.taken
        return self.waiting.pop(chosen.id)

    def peek(self):
        """What `take` would return."""
        waiting, served, taken = dict(self.waiting), dict(self.served), self.taken
        chosen = self.take()
        self.waiting, self.served, self.taken = waiting, served, taken
        return chosen

    def rank(self, one):
        known = self.lengths[one.group]
        match self.name:
            case "fifo":
                return 0
            case "least_generated":
                return one.generated
            case "context":
                longest = max(known.finished) if known.finished else MAX_TOKENS
                return (0, one.generated) if one.member == 0 else (1, -longest)
            case "history":
                pooled = [*known.earlier, *known.finished]
                estimate = sum(pooled) / len(pooled) if pooled else MAX_TOKENS
                return -max(estimate - one.generated, OVERDUE * one.generated)
            case "oracle":
                return one.generated - known.exact[one.member]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(order_module.ORDERS)), st.integers(1, 4), st.randoms(use_true_random=False))
def test_random_events_take_what_a_plain_sort_takes_and_each_request_once(name, group_size, random):
    waiting, plain = make_waiting(name), PlainOrder(name)
    running, groups = {}, {}
    for step in range(150):
        match random.choice(["add", "take", "take", "take", "put back", "return", "finish", "discard"]):
            case "add":
                group, exact = f"g{step}", [random.randint(1, MAX_TOKENS) for _ in range(group_size)]
                earlier = [random.randint(1, MAX_TOKENS) for _ in range(random.choice([0, group_size]))]
                waiting.add_group(group, Lengths(MAX_TOKENS, earlier, exact))
                plain.lengths[group] = Lengths(MAX_TOKENS, earlier, exact)
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
                siblings = [other for other in plain.waiting.values() if other.group == one.group]
                waiting.observe_finished(one.group, tokens, siblings)
                plain.lengths[one.group].finished.append(tokens)
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


def test_every_order_can_be_chosen():
    assert set(ORDERS) == {*order_module.ORDERS, "histopipe"}, "the last is in a file of its own"


def test_a_response_that_outgrows_its_estimate_is_taken_for_a_longer_one():
    assert remaining(100, 40) == 60
    assert remaining(100, 90) < remaining(100, 400) < remaining(100, 800)


def test_probes_come_first_then_the_group_whose_finished_sibling_was_longest():
    waiting = make_waiting("context")
    for number, group in enumerate("ab"):
        waiting.add_group(group, Lengths(MAX_TOKENS))
        waiting.add([Request(f"{group}/{k}", group, 10 * number + k, k) for k in range(3)])
    probes = [waiting.take(), waiting.take()]
    assert [one.id for one in probes] == ["a/0", "b/0"]
    for group, tokens in (("a", 5), ("b", 50)):
        rest = [Request(f"{group}/{k}", group, 10 * "ab".index(group) + k, k) for k in (1, 2)]
        waiting.observe_finished(group, tokens, rest)
    assert [waiting.take().id for _ in range(4)] == ["b/1", "b/2", "a/1", "a/2"]


def test_a_starved_group_that_finds_no_room_is_next_until_it_does():
    """A take that is undone serves nobody: else a group of long requests would lose its turn each time."""
    waiting = make_waiting("context")
    for number, group in enumerate("ab"):
        waiting.add_group(group, Lengths(MAX_TOKENS, finished=[50 - number]))
        waiting.add([Request(f"{group}/{k}", group, 100 * number + k, k) for k in range(1, 50)])
    for _ in range(SERVE_STARVED - 1):
        assert waiting.take().group == "a"
    for _ in range(3):
        starved = waiting.take()
        assert starved.group == "b"
        waiting.put_back(starved)
    assert waiting.take() is starved and waiting.take().group == "a"


@pytest.mark.parametrize("name", sorted({*order_module.ORDERS} - {"fifo"}))
def test_stale_items_do_not_accumulate(name):
    waiting = make_waiting(name)
    waiting.add_group("g", Lengths(MAX_TOKENS, exact=[50] * 100))
    requests = [Request(f"g/{k}", "g", k, k) for k in range(100)]
    waiting.add(requests)
    for step in range(3000):
        taken = waiting.take()
        taken.generated += 1
        waiting.add([taken])
        waiting.observe_finished("g", step, requests[:10])
    heaps = [heap for heap in vars(waiting).values() if isinstance(heap, StampedHeap)]
    assert heaps and all(len(heap._items) <= 2 * 100 + 64 for heap in heaps)
