"""Conversations: a request that goes on behind an observation is, to the bit, one long prompt."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion.inference import Request, SamplingParams
from fusion.inference.config import DraftsConfig
from fusion.inference.stop_strings import StopStrings
from fusion.rollout.drafts.drafter import TextDrafter
from tests.inference.keeping import keeping, suspend_and_return
from tests.inference.pooling import figures, files_in, pooling

STOPS = (7, 11, 13, 17)
PARAMS = SamplingParams(max_tokens=150, stop_token_ids=STOPS)
WANTED = [Request(f"r{i}", (3, 4, 5 + i // 2) * 9, PARAMS, f"g{i // 2}", turns=True) for i in range(4)]
TURNS = 4


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def observation(id, turn):
    draw = random.Random(f"{id} {turn}")
    return tuple(draw.randrange(2, 32) for _ in range(draw.randint(1, 40)))


class Conversations:
    """What was sampled of conversations of `TURNS` turns, and the requests that continue them."""

    def __init__(self, wanted, chunk=0):
        self.chunk, self.wanted = chunk, {request.id: request for request in wanted}
        self.turns = {request.id: [] for request in wanted}
        """By id, of each turn: what was before it, its tokens, their log-probabilities"""
        self.routing = {request.id: [] for request in wanted}
        self.next = [self._request(request.id, chunk_tokens=chunk) for request in wanted]

    def _request(self, id, **fields):
        self.turns[id] = self.turns[id] or [((), [], [])]
        before, tokens, _ = self.turns[id][-1]
        return replace(self.wanted[id], response=(*before, *tokens), turn_start=len(before), **fields)

    def take(self, outputs):
        """Record outputs, and prepare the requests that go on."""
        for output in outputs:
            id = output.request_id
            before, tokens, logprobs = self.turns[id][-1]
            tokens += output.tokens
            logprobs += output.logprobs
            if output.tokens:
                self.routing[id].append(output.routing)
            assert output.sampled == [True] * len(output.tokens)
            fields = dict(chunk_tokens=self.chunk, kv_tokens=output.kv_tokens, kv_rank=output.kv_rank)
            if output.finish_reason == "turn":
                assert tokens[-1] in STOPS and not {*STOPS} & {*tokens[:-1]}
                if len(self.turns[id]) < TURNS:
                    said = observation(id, len(self.turns[id]))
                    self.turns[id].append(((*before, *tokens, *said), [], []))
                    self.next.append(self._request(id, observation=len(said), **fields))
            elif output.finish_reason in ("chunk", "abort"):
                said = 0 if output.tokens else output.observation
                self.next.append(self._request(id, observation=said, **fields))
            else:
                assert output.finish_reason == "length"

    def run(self, engines, interrupt=lambda made: []):
        step = 0
        while self.next or not all(made.idle for made in engines):
            made = engines[step % len(engines)]
            submitted, self.next = self.next, []
            made.submit(submitted)
            outputs = made.step()
            for other in engines if not submitted else ():
                outputs += other.step()
            self.take(outputs + interrupt(made))
            step += 1
        return self


def check(found, routing=False):
    """Each turn is what a new engine samples behind one prompt with all that was before it."""
    made, _ = keeping(batch_invariant=True, suspended="recompute", prefix_cache=False, routing=routing)
    for id, turns in found.turns.items():
        for before, tokens, logprobs in turns:
            request = found.wanted[id]
            params = replace(PARAMS, max_tokens=PARAMS.max_tokens - len(before))
            made.submit([replace(request, prompt=request.prompt + before, params=params)])
            (whole,) = made.run()
            assert (tokens, logprobs) == (whole.tokens, whole.logprobs)
        if routing:
            assert torch.equal(torch.cat(found.routing[id]), whole.routing), "a row for each token but the last"
    assert sum(map(len, found.turns.values())) > 2 * len(found.turns)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("routing", [True, False])
@pytest.mark.parametrize("suspended", ["recompute", "keep"])
def test_a_turn_is_sampled_as_behind_one_long_prompt(suspended, routing, chunk):
    made, _ = keeping(suspended=suspended, batch_invariant=True, routing=routing, prefix_cache=False)
    check(Conversations(WANTED, chunk).run([made]), routing)
    status = made.status()
    restored, again = status["kv_restored_tokens"], status["recomputed_tokens"]
    assert (restored, again == 0) == ((0, False) if suspended == "recompute" else (restored, True))
    assert suspended == "recompute" or restored > 200
    made.forget([request.id for request in WANTED])
    made.step()
    assert made.parked.host_bytes == 0 and made.scheduler.blocks.available == made.scheduler.blocks.count


@pytest.mark.parametrize("suspended", ["recompute", "keep"])
def test_conversations_survive_suspensions_and_small_caches(suspended):
    limits = dict(max_kv_tokens=192, max_batch_tokens=16, max_seqs=16)
    made, _ = keeping(suspended=suspended, batch_invariant=True, routing=True, **limits)
    draw = random.Random(0)

    def interrupt(made):
        return suspend_and_return(made) if draw.random() < 0.1 else []

    check(Conversations(WANTED).run([made], interrupt), routing=True)
    assert made.status()["preemptions"]


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("routing", [True, False])
def test_later_turns_continue_behind_pooled_kv_on_any_engine(root, routing, chunk):
    engines = [pooling(root, rank, routing=routing, prefix_cache=False) for rank in range(2)]
    found = Conversations(WANTED, chunk).run(engines)
    check(found, routing)
    hits, pulls, misses, damaged = (sum(ends) for ends in zip(*map(figures, engines), strict=True))
    assert hits and pulls and not (misses or damaged)
    context = sum(made.status()["kv_restored_tokens"] for made in engines)
    again = sum(made.status()["recomputed_tokens"] for made in engines)
    assert again == 0 and context > 200
    for made in engines:
        made.forget([request.id for request in WANTED])
        made.step()
    assert not files_in(root)


def test_pooled_kv_of_a_part_of_an_observation_is_used(root):
    made = pooling(root, prefix_cache=False, max_batch_tokens=16, max_seqs=4)
    found = Conversations(WANTED[:1])

    def interrupt(made):
        (seq, *_) = made.scheduler.running or [None]
        inside = seq and seq.request.observation > 20 and not seq.logprobs and seq.computed > seq.known
        return made.suspend() if inside and not interrupted.append(seq.computed) and len(interrupted) == 1 else []

    interrupted = []
    check(found.run([made], interrupt))
    assert interrupted and figures(made)[2:] == (0, 0) and made.status()["recomputed_tokens"] == 0


def test_stop_strings_end_a_turn_and_are_looked_for_in_it_only():
    made, _ = keeping(batch_invariant=True)
    params = SamplingParams(max_tokens=60, stop_token_ids=())
    strings = StopStrings([chr(token) for token in STOPS], lambda tokens: "".join(map(chr, tokens)))
    made.scheduler.stop_strings = strings
    request = Request("s1", (3, 4, 5), params, turns=True)
    made.submit([request])
    (first,) = made.run()
    assert first.finish_reason == "turn" and first.tokens[-1] in STOPS and not {*STOPS} & {*first.tokens[:-1]}
    start = len(first.tokens) + 1
    again = replace(request, response=(*first.tokens, 9), observation=1, turn_start=start, chunk_tokens=1)
    tokens = []
    while True:
        made.submit([again])
        (output,) = made.run()
        tokens += output.tokens
        if output.finish_reason != "chunk":
            break
        again = replace(again, response=(*first.tokens, 9, *tokens), observation=0)
    assert output.finish_reason == "turn" and len(tokens) > 1 and not {*STOPS} & {*tokens[:-1]}
    assert strings.completes([*first.tokens, 9], 0), "which is why it is looked for in the turn only"


@pytest.mark.parametrize("chunk", [0, 4])
def test_an_exact_length_is_that_of_a_turn(chunk):
    made, _ = keeping()
    params, response = SamplingParams(max_tokens=20), (5, 6, 7)
    fields = dict(turn_start=3, turns=True, chunk_tokens=chunk)
    request = Request("r", (3, 4), params, response=response, observation=2, exact_tokens=6, **fields)
    tokens = []
    while True:
        made.submit([request])
        (output,) = made.run()
        tokens += output.tokens
        if output.finish_reason != "chunk":
            break
        request = replace(request, response=(*response, *tokens), observation=0)
    assert (output.finish_reason, len(tokens)) == ("turn", 6)
    made.submit([Request("s", (3, 4), params, response=response, observation=2, exact_tokens=20, **fields)])
    assert len(made.run()[0].tokens) == (chunk or 17)
    made.submit([Request("t", (3, 4), params, response=(5,) * 19, observation=0, exact_tokens=20, turns=True)])
    assert made.run()[0].finish_reason == "length", "no more than the whole response may have"


def test_drafts_change_no_token_of_a_conversation_and_an_observation_is_no_accepted_draft():
    drafter = TextDrafter.of(DraftsConfig(source="siblings"))
    made, _ = keeping(batch_invariant=True)
    made.scheduler.drafter = drafter
    greedy = replace(PARAMS, temperature=0.0)
    found = Conversations([replace(request, params=greedy, turns=True) for request in WANTED]).run([made])
    plain = Conversations([replace(request, params=greedy, turns=True) for request in WANTED])
    plain.run([keeping(batch_invariant=True)[0]])
    assert found.turns == plain.turns
    status = made.status()
    sampled = sum(len(tokens) for turns in found.turns.values() for _, tokens, _ in turns)
    assert 0 < status["accepted_tokens"] < sampled and status["generated_tokens"] == sampled
