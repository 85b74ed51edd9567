"""Drafters that read what other engines have generated: asynchronously, alike on all ranks, and only for speed."""

from __future__ import annotations

import logging
import threading

import pytest

from fusion.rollout.drafts import exchange
from fusion.rollout.drafts.exchange import TextExchange, answer
from fusion.rollout.drafts.suffix_index import HISTORY
from fusion.rollout.drafts.text_store import TextStore
from tests.inference.engines import by_id, engine, generate, requests
from tests.machine import wait_for
from tests.rollout.drafts.test_drafter import drafter, paths, sequence


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Run:
    """Drafters of several engines, whose threads are waited for."""

    def __init__(self, count=2, store=None, **options):
        self.clock, self.store = Clock(), store or TextStore(1 << 30)
        self.drafters = [drafter(**options) for _ in range(count)]
        for writer, made in enumerate(self.drafters):
            made.exchange = TextExchange(self.ask, writer, count, clock=self.clock)

    def ask(self, message):
        return answer(self.store, message)

    def step(self, made):
        """One step of an engine, to which what it sends is answered at once."""
        news = made.drafts_update()
        if news:
            made.read(news)
        if made.exchange._thread is not None:
            made.exchange._thread.join()
        return news

    def exchange(self, rounds=3):
        for _ in range(rounds):
            self.clock.now_s += 1
            for made in self.drafters:
                self.step(made)
                self.step(made)


def test_siblings_on_another_engine_are_followed_as_they_grow():
    run = Run()
    one, two = run.drafters
    first, second = sequence("g/0", [1], [2, 3, 4, 5, 6, 7], group="g"), sequence("g/1", [1], [2, 3, 4], group="g")
    assert paths(one, first) == [None] and paths(two, second) == [None]
    run.exchange()
    assert paths(two, second) == [[5, 6, 7]] and paths(one, first) == [None]
    first.tokens += [8, 9]
    paths(one, first)
    one.end(first)
    run.exchange()
    assert paths(two, second) == [[5, 6, 7, 8, 9]]
    assert (two.totals.read, two.totals.unread, one.totals.read) == (8, 0, 3)
    assert two.exchange.totals.received_tokens == 8 and two.exchange.totals.sent_tokens == 3


def test_only_prompts_with_running_requests_are_asked_for():
    run = Run()
    one, two = run.drafters
    first, other = sequence("g/0", [1], [2, 3, 4, 5], group="g"), sequence("h/0", [9], [2, 3, 4], group="h")
    paths(one, first)
    paths(two, other)
    run.exchange()
    assert two.exchange.totals.received_tokens == 0
    two.end(other)
    late = sequence("g/1", [1], [2, 3, 4], group="g")
    paths(two, late)
    run.exchange()
    assert paths(two, late) == [[5]]


@pytest.mark.parametrize("history", [False, True])
def test_the_next_epoch_on_another_engine_has_the_history(history):
    run = Run(history=history)
    one, two = run.drafters
    old = sequence("e0/0", [1], [2, 3, 4, 5, 6, 7], group="e0")
    paths(one, old)
    one.end(old)
    run.exchange()
    new = sequence("e1/0", [1], [2, 3, 4], group="e1")
    paths(two, new)
    run.exchange()
    assert paths(two, new) == [[5, 6, 7] if history else None]
    if history:
        assert two._drafted[id(new)][1].tolist() == [HISTORY] * 3


def test_a_group_of_which_text_came_first_has_it_as_siblings():
    """A request of it comes while one of another group runs, or when none does."""
    for runs in (True, False):
        run = Run()
        one, two = run.drafters
        older = sequence("e0/0", [1], [7, 7, 7], group="e0")
        paths(two, older)
        newer = sequence("e1/0", [1], [2, 3, 4, 5], group="e1")
        paths(one, newer)
        run.exchange()
        if not runs:
            two.end(older)
        late = sequence("e1/1", [1], [2, 3, 4], group="e1")
        assert paths(two, late) == [[5]]
        newer.tokens += [6]
        paths(one, newer)
        run.exchange()
        assert paths(two, late) == [[5, 6]]


def test_a_request_that_moves_is_sent_once_and_is_one_text():
    run = Run()
    one, two = run.drafters
    first = sequence("g/0", [1], [2, 3, 4, 5], group="g")
    witness = sequence("g/1", [1], [9], group="g")
    paths(one, first)
    paths(two, witness)
    run.exchange()
    one.end(first)
    moved = sequence("g/0", [1], [], group="g")
    moved.request.response = (2, 3, 4, 5)
    moved.tokens += [2, 3, 4, 5, 6]
    paths(two, moved)
    run.exchange()
    assert len(two.texts.live["g/0"].numbers) == 2, "it goes on with the text that had arrived"
    assert two.exchange.totals.sent_tokens == 2, "the token of the witness, and the new one"
    two.end(moved)
    back = sequence("g/0", [1], [], group="g")
    back.request.response = (2, 3, 4, 5, 6)
    back.tokens += [2, 3, 4, 5, 6, 8]
    other = sequence("g/2", [1], [3, 4, 5], group="g")
    paths(one, other)
    run.exchange()
    assert paths(one, other) == [[6]]
    assert paths(one, back, other)[1] == [6, 8]
    assert one.texts.live["g/0"].numbers == {"g/0": 1, "g/1": 2, "g/2": 3}, "as before"


def test_text_that_was_dropped_for_memory_is_asked_for_again():
    run = Run(max_bytes=60_000)
    one, two = run.drafters
    first, second = sequence("g/0", [1], [2, 3, 4, 5], group="g"), sequence("g/1", [1], [2, 3, 4], group="g")
    paths(one, first)
    paths(two, second)
    run.exchange()
    two.end(second)
    big = sequence("h/0", [5], list(range(3000)), group="h")
    paths(two, big)
    two.end(big)
    paths(two, sequence("h/1", [5], [1], group="h"))
    third = sequence("g/2", [1], [2, 3, 4], group="g")
    assert paths(two, third) == [None]
    run.exchange()
    assert paths(two, third) == [[5]]


def test_a_rank_that_reads_the_same_news_drafts_alike_and_a_step_reads_little(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_STEP_TOKENS", 7)
    run = Run()
    one, two = run.drafters
    first = sequence("g/0", [1], list(range(20)), group="g")
    paths(one, first)
    head, follower = sequence("g/1", [1], [3, 4, 5], group="g"), sequence("g/1", [1], [3, 4, 5], group="g")
    other = drafter()
    paths(two, head)
    paths(other, follower)
    run.clock.now_s += 1
    run.step(one)
    seen = []
    for _ in range(6):
        run.clock.now_s += 1
        if news := run.step(two):
            other.read(news)
        seen.append(paths(two, head))
        assert paths(other, follower) == seen[-1]
    assert two.totals.read == other.totals.read == 20
    assert seen[:3] == [[None], [[6]], [list(range(6, 14))]] == [*seen[:2], seen[-1]]


def test_a_store_that_ends_is_reported_once_and_the_drafter_goes_on(caplog):
    run = Run()
    one, two = run.drafters
    first, second = sequence("g/0", [1], [2, 3, 4, 5], group="g"), sequence("g/1", [1], [2, 3, 4], group="g")
    paths(one, first)
    paths(two, second)
    run.exchange()

    def ended(message):
        raise ConnectionError("the actor has died")

    two.exchange._call = ended
    with caplog.at_level(logging.WARNING):
        for token in range(10, 15):
            second.tokens += [token]
            paths(two, second)
            run.exchange()
    assert [record.message for record in caplog.records] == [
        "drafts: no text of other engines from now on: the actor has died"
    ]
    assert two.exchange.totals.failures == 1 and two.exchange._thread is None
    second.tokens += [2, 3, 4]
    assert paths(two, second) == [[5]], "what had arrived stays"


def test_a_store_that_sends_nonsense_is_one_that_has_ended(caplog):
    run = Run()
    one, two = run.drafters
    two.exchange._call = lambda message: b"nonsense"
    paths(two, sequence("g/1", [1], [2, 3, 4], group="g"))
    run.exchange()
    assert two.exchange.totals.failures == 1 and "message between drafters is damaged" in caplog.text


def test_a_store_that_hangs_is_not_waited_for_and_reported_once(caplog):
    made, clock, release = drafter(), Clock(), threading.Event()
    store = TextStore(1 << 20)

    def slow(message):
        release.wait()
        return answer(store, message)

    made.exchange = TextExchange(slow, 0, 2, clock=clock)
    seq = sequence("g/1", [1], [2, 3, 4], group="g")
    for _ in range(100):
        seq.tokens += [5]
        paths(made, seq)
        clock.now_s += 1
        assert made.drafts_update() == b""
    assert caplog.text.count("has not answered") == 1 and made.exchange.totals.failures == 0
    release.set()
    wait_for(lambda: not made.exchange._thread.is_alive(), 10)
    run = Run(1, store=store)
    run.drafters[0].exchange._writer = 1
    made.drafts_update()
    made.drafts_update()
    wait_for(lambda: not made.exchange._thread.is_alive(), 10)
    other = sequence("g/0", [1], [2, 3, 4], group="g")
    paths(run.drafters[0], other)
    run.exchange()
    assert paths(run.drafters[0], other)[0][:2] == [5, 5]


def test_a_prompt_that_is_new_is_asked_for_soon():
    run = Run()
    one, two = run.drafters
    run.exchange()
    sent = []
    for step in range(60):
        if step == 30:
            paths(two, sequence("g/1", [1], [2, 3, 4], group="g"))
        run.clock.now_s += 0.01
        before = two.exchange.totals.messages
        run.step(two)
        sent += [step] * (two.exchange.totals.messages > before)
    assert sent[0] == 31 and len(sent) == 2 and abs(sent[1] - 31 - 100 * exchange.INTERVAL_S) <= 1, sent


def test_an_engine_that_stops_sends_what_others_do_not_know_yet():
    run = Run()
    one, two = run.drafters
    first = sequence("g/0", [1], [2, 3, 4], group="g")
    paths(one, first)
    run.exchange()
    first.tokens += [5, 6, 7]
    paths(one, first)
    one.end(first)
    sent = one.exchange.totals.sent_tokens
    run.step(one)
    assert one.exchange.totals.sent_tokens == sent, "its next message is not due"
    one.flush()
    one.exchange._thread.join()
    second = sequence("g/1", [1], [2, 3, 4], group="g")
    paths(two, second)
    run.clock.now_s += 1
    for _ in range(2):
        run.step(two)
    assert paths(two, second) == [[5, 6, 7]]
    one.flush()
    one.flush()
    assert one.exchange.totals.sent_tokens == sent + 3, "nothing is sent twice"
    drafter().flush()


def test_messages_are_rarer_where_there_are_many_engines():
    few, many = (TextExchange(bytes, 0, count) for count in (2, 4000))
    assert few._interval_s == exchange.INTERVAL_S and many._interval_s == 10


def test_engines_sample_the_same_with_the_text_of_others_and_accept_more():
    wanted = requests(count=12, max_tokens=60, temperature=0.0)
    wanted = [one for one in wanted if int(one.id[1:]) % 3 < 2]
    plain = by_id(generate(engine(batch_invariant=True), wanted))
    accepted = {}
    for shares in (False, True):
        run, found, made = Run(), {}, []
        for number, own in enumerate(run.drafters):
            made.append(engine(batch_invariant=True))
            made[-1].scheduler.drafter = own
            if not shares:
                own.exchange = None
            made[-1].submit([one for one in wanted if int(one.id[1:]) % 3 == number])
        # The first is 20 tokens ahead: siblings that decode side by side help each other little.
        for step in range(200):
            for one in made[: 1 + (step > 20)]:
                run.clock.now_s += 1
                found |= by_id(one.step())
                if shares and one.scheduler.drafter.exchange._thread is not None:
                    one.scheduler.drafter.exchange._thread.join()
        assert found == plain
        accepted[shares] = made[1].scheduler.counters.accepted_tokens
    assert accepted[True] > accepted[False]
