"""Whatever the model, the drafts, the schedule, the layout and the breaks: tokens and log-probabilities are those
without drafts to the bit, and each token's version is that of the weights that verified it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.inference import EmbeddedEngine
from fusion.inference.verification import Draft
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.offload import HostPool
from fusion.rollout.drafts.drafter import TextDrafter
from tests.helpers import run_ranks, tiny_config
from tests.inference.engines import by_id, card, checkpoint, empty_card, generate, generate_brokenly, requests
from tests.inference.keeping import resumed, steps
from tests.inference.test_verification import Guesses, truth_of
from tests.pairwise import axes, is_wide, thinned
from tests.rollout.drafts.plain_indexes import PlainIndexes
from tests.rollouts import rollout_config


class Traps(Guesses):
    """Drafts as deep as allowed that are right but for the last token, then go on behind stop tokens and limits."""

    def tree(self, seq, max_depth, count):
        said = [*self.truth[seq.request.id][len(seq.tokens) - seq.first_token :], 1, 1, 1]
        said = said[: min(max_depth, count)]
        if not said:
            return None
        said[-1] = (said[-1] + self.draw.randrange(2)) % 32
        return Draft(said, range(-1, len(said) - 1))


@cache
def random_model(seed: int, experts: bool, layers: int, kv_heads: int) -> Transformer:
    """Weights large enough for responses that differ, with an end token that is sampled now and then."""
    config = tiny_config(experts, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=kv_heads)
    made = Transformer(config, Mesh.single(), card(), torch.float32, batch_invariant=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.15 if parameter.dim() > 1 else torch.ones(1)
            parameter.copy_(values.expand(parameter.shape))
    return made


@pytest.fixture(scope="module", autouse=True)
def models_are_left(card_is_left):
    """Before the card is."""
    yield
    random_model.cache_clear()


def engine_of(model: Transformer, seed: int, **rollout) -> EmbeddedEngine:
    config = rollout_config(**(dict(max_length=256, max_batch_tokens=512, batch_invariant=True) | rollout))
    memory = HostPool(card()) if config.kv_pool.keeps_kv else None
    made = EmbeddedEngine(model, model.mesh, empty_card(), config, seed, memory=memory)
    made.allocate_kv()
    return made


def check_versions(made: EmbeddedEngine) -> None:
    """Asserts in every step that the tokens it appends are of the engine's version."""
    commit = made.scheduler.commit

    def checked(step, *sampled):
        before = {id(seq): len(seq.versions) for seq in step.drawn}
        outputs = commit(step, *sampled)
        for seq in step.drawn:
            assert {*seq.versions[before[id(seq)] :]} == {made.policy_version}
            assert len(seq.versions) == len(seq.logprobs)
        return outputs

    made.scheduler.commit = checked


models = st.builds(random_model, st.integers(0, 2), st.booleans(), st.integers(1, 2), st.sampled_from((1, 2, 4)))
sampling = st.sampled_from(
    (dict(), dict(temperature=0.0), dict(temperature=0.6), dict(top_p=0.8), dict(top_k=5), dict(min_p=0.05))
)
schedules = st.fixed_dictionaries(
    dict(
        max_seqs=st.sampled_from((2, 5, 64)),
        max_batch_tokens=st.sampled_from((64, 90, 512)),
        max_kv_tokens=st.sampled_from((192, 400, 4096)),
        block_size=st.sampled_from((16, 32)),
        prefix_cache=st.booleans(),
        suspended=st.sampled_from(("recompute", "keep")),
    )
)
kinds = st.sampled_from(("right", "mixed", "wrong", "traps", "text"))


def drafter_of(kind: str, truth: dict[str, list[int]], children: int, seed: int):
    if kind == "text":
        return TextDrafter(PlainIndexes(1), max_children=children)
    share = {"right": 1.0, "mixed": 0.6, "wrong": 0.0, "traps": 1.0}[kind]
    return (Traps if kind == "traps" else Guesses)(truth, right=share, children=children, seed=seed)


@settings(max_examples=40)
@given(
    model=models,
    params=sampling,
    schedule=schedules,
    kind=kinds,
    children=st.integers(1, 4),
    seed=st.integers(0, 99),
    broken=st.booleans(),
)
def test_drafts_change_no_token_and_no_logprob(model, params, schedule, kind, children, seed, broken):
    wanted = requests(count=7, max_tokens=24, seed=seed, **params)
    plain = by_id(generate(engine_of(model, seed), wanted))
    drafted = engine_of(model, seed, **schedule)
    drafted.scheduler.drafter = drafter_of(kind, truth_of(plain), children, seed)
    check_versions(drafted)
    found = generate_brokenly(drafted, wanted, seed) if broken else by_id(generate(drafted, wanted))
    assert found == plain
    scheduler = drafted.scheduler
    assert scheduler.blocks.available == scheduler.blocks.count, "no block is lost"
    assert scheduler.counters.accepted_tokens <= scheduler.counters.drafted_tokens
    if kind == "wrong":
        assert scheduler.counters.accepted_tokens < 0.2 * max(10, scheduler.counters.drafted_tokens)
    drafted.release_kv()


def rank(rank, device, folder, parallel, kind, children):
    """The same requests without drafts, then with drafts in chunks, suspended and resumed. Returns both, of the
    requests that ended here."""
    found, truth, accepted = [], {}, 0.0
    for drafts in (False, True):
        mesh = Mesh.create(parallel)
        config = rollout_config(max_length=256, max_seqs=6, max_batch_tokens=64, batch_invariant=True)
        loaded = Transformer(ModelConfig.from_hf(folder), mesh, device, batch_invariant=True)
        load_weights(loaded, folder)
        made = EmbeddedEngine(loaded, mesh, device, config, 5)
        made.allocate_kv()
        wanted, had, draw = requests(9, max_tokens=22, temperature=0.5), {}, random.Random(3)
        again = [replace(request, chunk_tokens=7 * drafts) for request in wanted]
        if drafts:
            made.scheduler.drafter = drafter_of(kind, truth, children, seed=0)
            check_versions(made)
        while again:
            if rank == 0:
                made.submit(again)
            outputs = steps(made, draw.randrange(2, 9)) + made.suspend() if drafts else made.run()
            everyone = [None] * parallel.world
            torch.distributed.all_gather_object(everyone, outputs)
            again = resumed(wanted, [output for mine in everyone for output in mine], had)
        truth = {name: tokens for name, (tokens, _) in had.items()}
        found.append(had)
        accepted = made.status()["accepted_tokens"]
        made.release_kv()
    return found, accepted


WORLDS = [Parallel(2, tp=2), Parallel(2, pp=2), Parallel(2, ep=2), Parallel(4, tp=2, ep=2), Parallel(4, ep=2, pp=2)]
CASES = list(product(WORLDS, ("right", "mixed", "traps", "text"), (1, 3)))


@pytest.mark.parametrize(
    ("parallel", "kind", "children"),
    thinned(CASES, lambda case: (*axes(case[0]), *case[1:]), extended=lambda case: is_wide(case[0])),
    ids=str,
)
def test_drafts_change_no_token_and_no_logprob_in_any_layout(parallel, kind, children):
    for (plain, drafted), accepted in run_ranks(rank, parallel.world, checkpoint(), parallel, kind, children):
        assert drafted == plain and len(plain) == 9
        assert accepted > 0
