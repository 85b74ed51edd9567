import threading
from itertools import count

import pytest
import torch

from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.inference.sequence import Sequence
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.exchange import TextExchange, answer
from fusion.rollout.drafts.text_store import TextStore
from tests.helpers import run_ranks
from tests.inference.engines import by_id, checkpoint, engine, generate, requests, tokens
from tests.pairwise import axes, is_wide, thinned
from tests.rollout.drafts.plain_indexes import PlainIndexes
from tests.rollouts import rollout_config


def build(device, folder, parallel, dtype=torch.float32, **rollout):
    mesh = Mesh.create(parallel)
    config = rollout_config(**(dict(max_length=256, max_seqs=8, max_batch_tokens=64) | rollout))
    loaded = Transformer(
        ModelConfig.from_hf(folder), mesh, device, dtype, batch_invariant=config.engine.batch_invariant
    )
    load_weights(loaded, folder)
    made = EmbeddedEngine(loaded, mesh, device, config, seed=5)
    made.allocate_kv()
    return made


def generate_rank(rank, device, folder, parallel, rollout):
    made = build(device, folder, parallel, **rollout)
    wanted = requests(9, 24)
    outputs = []
    if rank == 0:
        made.submit(wanted[:5])
    outputs += made.step() + made.step()
    if rank == 0:
        made.submit(wanted[5:])
    outputs += made.run()
    made.release_kv()
    return outputs, made.status()


LAYOUTS = [
    Parallel(2, tp=2),
    Parallel(2, ep=2),
    Parallel(2, pp=2),
    Parallel(4, ep=4),
    Parallel(4, tp=2, ep=2),
    Parallel(4, tp=4, ep=2),
    Parallel(4, ep=2, pp=2),
    Parallel(4, tp=2, ep=2, etp=2),
]


@pytest.mark.parametrize("parallel", thinned(LAYOUTS, axes, extended=is_wide), ids=str)
def test_every_layout_samples_the_same_tokens(parallel):
    results = run_ranks(generate_rank, parallel.world, checkpoint(), parallel, dict(max_kv_tokens=160))
    outputs = [output for mine, _ in results for output in mine]
    assert tokens(outputs) == tokens(generate(engine(), requests(9, 24)))
    for rank, (mine, _) in enumerate(results):
        tells = parallel.coordinate("tp", rank) == parallel.coordinate("pp", rank) == 0
        assert bool(mine) == tells  # every attention rank had work, its first TP rank on the first stage tells
    statuses = [{k: v for k, v in status.items() if k != "tokens_per_s"} for _, status in results]
    assert all(status == statuses[0] for status in statuses)
    assert statuses[0]["generated_tokens"] == sum(len(output.tokens) for output in outputs)
    assert statuses[0]["depth"] == statuses[0]["running"] == 0
    if parallel.dp > 1:
        assert statuses[0]["dummy_steps"] > 0


def test_batch_invariant_logprobs_do_not_depend_on_the_number_of_attention_ranks():
    results = run_ranks(generate_rank, 2, checkpoint(), Parallel(2, ep=2), dict(batch_invariant=True))
    got = by_id([output for mine, _ in results for output in mine])
    assert got == by_id(generate(engine(batch_invariant=True), requests(9, 24)))


def siblings_rank(rank, device, folder):
    """Groups of the responses that this rank gives to two groups of two: whole, in chunks, and in turns."""
    made, groups = build(device, folder, Parallel(2, ep=2)), []
    for chunk, turns in ((0, False), (96, False), (0, True)):
        if rank == 0:
            params = SamplingParams(max_tokens=96, stop_token_ids=())
            ids = [f"{group}{number}/{chunk}/{turns}" for group in "ab" for number in range(2)]
            made.submit([Request(id, (1, 2, 3), params, id[0], chunk_tokens=chunk, turns=turns) for id in ids])
        groups.append(sorted(output.group for output in made.run()))
    return groups


def test_siblings_with_a_short_prompt_are_on_different_ranks_unless_they_are_placed_again():
    first, second = run_ranks(siblings_rank, 2, checkpoint())
    assert first == [["a", "b"], ["a", "a"], ["a", "a"]] and second == [["a", "b"], ["b", "b"], ["b", "b"]]


def drafting_rank(rank, device, folder, parallel):
    made = build(device, folder, parallel, batch_invariant=True, temperature=0.6)
    made.scheduler.drafter = TextDrafter(PlainIndexes(1))
    made.scheduler.drafter.budget.skips = lambda: False
    if rank == 0:
        made.submit(requests(12, temperature=0.6))
    outputs = made.run()
    return outputs, made.status()


@pytest.mark.parametrize(
    "parallel", [Parallel(2, tp=2), pytest.param(Parallel(4, ep=2, pp=2), marks=pytest.mark.extended)], ids=str
)
def test_ranks_with_one_schedule_verify_the_same_drafts(parallel):
    """Although only the leader's times decide how much is drafted."""
    results = run_ranks(drafting_rank, parallel.world, checkpoint(), parallel)
    got = tokens([output for mine, _ in results for output in mine])
    assert got == tokens(generate(engine(batch_invariant=True), requests(12, temperature=0.6)))
    assert results[0][1]["drafted_tokens"] > results[0][1]["accepted_tokens"] > 0


def exchanging_rank(rank, device, folder, parallel):
    """As `drafting_rank`; what another engine is said to have generated arrives at some step."""
    made = build(device, folder, parallel, batch_invariant=True, temperature=0.6)
    made.scheduler.drafter = drafter = TextDrafter(PlainIndexes(1))
    drafter.budget.skips = lambda: False
    store, wanted, drafts = TextStore(1 << 30), requests(12, temperature=0.6), []
    other = TextDrafter(PlainIndexes(1))
    other.exchange = TextExchange(lambda message: answer(store, message), 99, 2, clock=iter(range(10**6)).__next__)
    for one in wanted:
        said = Sequence.of(Request(f"other-{one.id}", one.prompt, one.params, one.group), one.params, ())
        said.tokens += [2 + (7 * i) % 29 for i in range(100)]
        other.draft([said], [8], 100)
    other.drafts_update()
    other.exchange._thread.join()
    if made.mesh.tp_rank == 0 and made.mesh.first_stage:
        drafter.exchange = TextExchange(lambda message: answer(store, message), rank, 2)
    made_drafts = drafter.draft
    drafter.draft = lambda *args: drafts.append(made_drafts(*args)) or drafts[-1]
    if rank == 0:
        made.submit(wanted)
    outputs = made.run()
    return outputs, (made.mesh.dp_rank, drafter.totals.read, drafts)


@pytest.mark.parametrize(
    "parallel", [pytest.param(Parallel(2, tp=2), marks=pytest.mark.extended), Parallel(4, ep=2, pp=2)], ids=str
)
def test_ranks_with_one_schedule_read_what_others_have_generated_at_the_same_step(parallel):
    results = run_ranks(exchanging_rank, parallel.world, checkpoint(), parallel)
    got = tokens([output for mine, _ in results for output in mine])
    assert got == tokens(generate(engine(batch_invariant=True), requests(12, temperature=0.6)))
    seen = {}
    for _, (schedule, read, drafts) in results:
        assert read > 0 and any(map(any, drafts))
        assert seen.setdefault(schedule, (read, drafts)) == (read, drafts)
    assert len(seen) == parallel.dp < parallel.world


def orders_rank(rank, device, folder):
    made = build(device, folder, Parallel(4, tp=2, ep=2))
    if rank == 0:
        params = SamplingParams(max_tokens=40, stop_token_ids=())
        made.submit([Request(f"r{i}", (3, 4), params) for i in range(6)])
        aborter = threading.Thread(target=made.abort, args=(["r1", "r4"],))
        commit, steps = made.scheduler.commit, count()

        def counted(*args):
            if (step := next(steps)) == 3:
                aborter.start()
            elif step == 9:
                aborter.join()
            return commit(*args)

        made.scheduler.commit = counted
    first = made.run()
    if rank == 0:
        made.submit([Request(f"s{i}", (3, 4), params) for i in range(6)])
    second = [output for _ in range(3) for output in made.step()]
    if rank == 0:
        made.submit([Request("late", (3, 4), params)])
        made.abort(["s0"])
    second += made.suspend()
    return first, second, made.step(), made.idle


def test_orders_reach_every_rank_while_it_steps():
    results = run_ranks(orders_rank, 4, checkpoint())
    first = {o.request_id: o for mine, *_ in results for o in mine}
    assert {name: o.finish_reason for name, o in first.items()} == {
        f"r{i}": "abort" if i in (1, 4) else "length" for i in range(6)
    }
    assert all(3 < len(first[name].tokens) < 20 for name in ("r1", "r4"))
    second = {o.request_id: o for _, mine, *_ in results for o in mine}
    assert set(second) == {f"s{i}" for i in range(6)} | {"late"}
    assert all(o.finish_reason == "abort" for o in second.values())
    assert all(len(second[f"s{i}"].tokens) == 3 for i in range(6)) and second["late"].tokens == []
    assert all(rest == [] and idle for *_, rest, idle in results)


def capacity_rank(rank, device, folder):
    made = build(device, folder, Parallel(2, ep=2), max_kv_tokens=(128, 64)[rank])
    return made.capacity_tokens


def test_capacity_is_the_smallest_of_all_ranks():
    assert run_ranks(capacity_rank, 2, checkpoint()) == [64, 64]
