"""The invariants of `stalesync.simulator.decoding` and `drafts`: a loop over the steps gains the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.inference.config import EngineConfig
from stalesync.simulator.clock import Clock
from stalesync.simulator.decoding import EPSILON, Decoding
from stalesync.simulator.drafts import KEPT_BY_SIBLINGS, MAX_DRAFTED, DraftSpec
from stalesync.simulator.engine import SimulatedEngine
from stalesync.simulator.sequence import EngineSpec, RequestSize, SimulatedRequest, SimulatedSequence
from tests.stalesync.simulator.configs import config_of as run_config
from tests.stalesync.simulator.configs import engine_cost, simulation_of

COST = engine_cost()
SPECS = st.sampled_from([DraftSpec(), DraftSpec(history=True), DraftSpec(siblings=False, history=True)])
RATES = st.dictionaries(st.sampled_from([0, 1, 5]), st.floats(1.0, 4.0), max_size=3)
CHANGES = st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["add", "move", "rates"]), RATES), min_size=1)


@settings(max_examples=60)
@given(CHANGES, st.data())
def test_every_sequence_gains_the_tokens_of_its_track_and_ends_when_it_has_what_it_lacked(changes, data):
    decoding, step, gained, ended = Decoding(16), 0, {}, []
    rates = {0: 1.0}
    for steps, kind, new_rates in [*changes, (10_000, "rates", {})]:
        for _ in range(steps):
            step += 1
            for seq in gained:
                gained[seq] += rates.get(seq.track, 1)
            assert (first := decoding.first_end(step - 1)) is None or first >= step
            for seq in sorted(decoding.ended(step), key=lambda seq: seq.order):
                assert gained.pop(seq) >= seq.limit - seq.start - 1e-3
                assert decoding.remove(seq, step) == seq.limit
                ended.append(seq)
            for seq, tokens in gained.items():
                assert tokens < seq.limit - seq.start + 1e-3
                assert abs(decoding.length(seq, step) - seq.start - tokens) <= 1 + EPSILON
            contexts = sum(seq.start + tokens for seq, tokens in gained.items())
            assert decoding.contexts(step) == pytest.approx(contexts)
            assert abs(decoding.used(step) - sum(-(-decoding.length(s, step) // 16) for s in gained)) <= len(gained)
            if not gained:
                break
        if kind == "add":
            seq = Tracked(len(ended) + len(gained), data.draw(st.integers(1, 30)), data.draw(st.integers(1, 60)))
            decoding.add(seq, step)
            gained[seq] = 0
        elif kind == "move" and gained:
            decoding.move(next(iter(gained)), step, data.draw(st.sampled_from([0, 1, 5])))
        known = {track: rate for track, rate in new_rates.items() if track in decoding.tracks}
        rates |= known
        decoding.set_drafts(step, 1, known)
    assert not gained and not decoding.num


class Tracked(SimulatedSequence):
    """A sequence that remembers the length with which it began."""

    def __init__(self, order, length, tokens):
        super().__init__(SimulatedRequest(f"a/{order}", "a"), 0, length, length, length + tokens, complete=True)
        self.order, self.start = order, length


@given(SPECS, st.integers(1, 64), st.sampled_from([0, 1, 5, 15]), st.integers(0, 1_000_000))
def test_no_other_number_of_drafted_tokens_promises_more_tokens_a_second(spec, num, track, contexts):
    def rate(drafted):
        seconds = max(fixed + slope * contexts for fixed, slope in COST.decode_lines(num, drafted))
        return num * spec.tokens_per_step(track, drafted) / seconds

    chosen = spec.choose(COST, {track: num}, contexts=contexts)
    assert rate(chosen) == pytest.approx(max(rate(drafted) for drafted in range(MAX_DRAFTED + 1)))


def test_full_drafts_keep_the_published_number_of_tokens():
    for siblings, kept in KEPT_BY_SIBLINGS.items():
        assert DraftSpec().tokens_per_step(DraftSpec().track(siblings), MAX_DRAFTED) == pytest.approx(kept)
    assert DraftSpec().track(4) == 1 and DraftSpec(siblings=False).track(4) == 0
    assert DraftSpec(history=True).tokens_per_step(0, 1) == 1.65


@settings(max_examples=30, deadline=None)
@given(SPECS, st.lists(st.tuples(st.integers(1, 40), st.integers(1, 200)), min_size=1, max_size=12), st.integers(1, 4))
def test_with_drafts_every_request_ends_once_with_its_length_and_not_later(spec, sizes, slots):
    ends = [ended(sizes, slots, drafts) for drafts in (None, spec)]
    assert [tokens for tokens, _ in ends] == [{f"a/{i}": size for i, (_, size) in enumerate(sizes)}] * 2
    step_s = [max(fixed + slope * 4096 for fixed, slope in COST.decode_lines(slots, n)) for n in (0, MAX_DRAFTED)]
    wasted_s = len(sizes) * (step_s[1] - step_s[0])  # the last step of a response may verify more than it needs
    assert ends[1][1] <= ends[0][1] * 1.001 + wasted_s


def ended(sizes, slots, drafts):
    clock, tokens = Clock(), {}

    def samples(_, finished):
        assert not tokens.keys() & finished.keys()
        tokens.update(finished)
        engine.observe_finished("a", len(tokens))

    reports = dict(put=samples, put_chunks=lambda *_: None, note_stopped=lambda *_: None)
    spec = EngineSpec(COST, 2, EngineConfig(max_seqs=slots, max_batch_tokens=4096), 4096, drafts=drafts)
    size_of = {f"a/{i}": RequestSize(prompt, 0, size) for i, (prompt, size) in enumerate(sizes)}
    engine = SimulatedEngine(0, spec, clock, size_of=lambda one: size_of[one.id], **reports)
    engine.start([SimulatedRequest(id, "a") for id in size_of], 0, time=0.0, stay=False)
    clock.wait_for(lambda: not engine.running)
    return tokens, clock.now


def test_a_run_with_drafts_trains_the_same_groups_in_less_time():
    from dataclasses import replace

    runs = [simulation_of(run_config(order="least_generated", chunk_tokens=4, suspended="keep")) for _ in range(2)]
    spec = replace(runs[1].setup.engine, drafts=DraftSpec())
    for engine in runs[1].cards.engines:
        engine.spec = spec
    runs[1].cards.setup = replace(runs[1].setup, engine=spec)
    plain, drafted = (run.run() for run in runs)
    assert [step.groups for step in plain] == [step.groups for step in drafted]
    assert sum(step.generate_s for step in drafted) < sum(step.generate_s for step in plain)
