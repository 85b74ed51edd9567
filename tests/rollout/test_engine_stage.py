"""Samples suspended at the end of a chunk: the engine's first card reports those of all its cards, each once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from distqueue import LocalQueue
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.rollout import SuspendedSample, engine_stage
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.suffix_index import SuffixIndexes
from fusion.telemetry import Metrics, Timeline
from tests.helpers import run_ranks
from tests.inference.conftest import card_is_left as card_is_left
from tests.inference.engines import checkpoint, engine
from tests.machine import patience, wait_for
from tests.rollouts import rollout_config


def run_stage(rank, device, folder):
    engine_stage.MAX_PENDING_S = 0.0
    mesh, config = Mesh.create(Parallel(2, ep=2)), rollout_config(max_length=256, max_seqs=8, max_batch_tokens=64)
    model = Transformer(ModelConfig.from_hf(folder), mesh, device)
    load_weights(model, folder)
    engine = EmbeddedEngine(model, mesh, device, config, seed=5)
    engine.allocate_kv()
    queue = LocalQueue(["train"])
    stage = engine_stage.EngineStage(engine, queue)
    params = SamplingParams(max_tokens=60, stop_token_ids=())
    requests = [Request(f"c{k}", (3, 4), params, group=f"c{k}", chunk_tokens=3) for k in range(4)]
    requests += [Request(f"w{k}", (3, 4), params, group=f"w{k}") for k in range(4)]
    suspended = stage.run(requests if rank == 0 else [], stay=False, metrics=Metrics(), timeline=Timeline("card"))
    held = {id for id in (f"c{k}~3" for k in range(4)) if _holds(queue, id)}
    return suspended, held, stage.await_suspended(60.0) if rank == 0 else []


def _holds(queue, row):
    try:
        return bool(queue.read([row], ["partial_response"]).ids)
    except ValueError:
        return False


def test_the_first_card_reports_what_all_cards_suspended():
    (first, first_held, later), (second, second_held, _) = run_ranks(run_stage, 2, checkpoint())
    assert first_held and second_held and not first_held & second_held, "both cards suspended samples"
    assert {one.earlier for one in first} == first_held | second_held and len(first) == 4, "and the first reported all"
    assert second == later == []
    assert set(first) == {SuspendedSample(f"c{k}", 3, f"c{k}~3", (0, 0), one.kv_rank) for k, one in _by_number(first)}


def test_who_waits_for_ended_chunks_gets_them_while_the_engine_runs_and_returns_when_the_stage_ends():
    made = engine(max_length=256)
    stage = engine_stage.EngineStage(made, LocalQueue(["train"]))
    params = SamplingParams(max_tokens=60, stop_token_ids=())
    request = Request("c0", (3, 4), params, group="c0", chunk_tokens=3)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(stage.run, [request], stay=True, metrics=Metrics(), timeline=Timeline("card"))
        wait_for(lambda: made.status()["generated_tokens"], 60)
        assert [one.id for one in stage.await_suspended(patience(60))] == ["c0"] and not running.done()
        made.pause()
        assert stage.await_suspended(patience(60)) == [] and running.result() == []


def test_a_stage_sends_all_its_text_to_other_engines_when_it_ends():
    sent = []

    class Flushed(TextDrafter):
        def flush(self):
            texts = [text for prompt in self.texts.prompts.values() for text in prompt.texts.items()]
            sent.append({request: len(text) for request, text in texts})

    drafter = Flushed(SuffixIndexes())
    made = engine(max_length=64)
    made.scheduler.drafter = drafter
    stage = engine_stage.EngineStage(made, LocalQueue(["train"]), drafter=drafter)
    params = SamplingParams(max_tokens=9, stop_token_ids=())
    requests = [Request(f"g/{k}", (3, 4), params, group="g") for k in range(2)]
    stage.run(requests, stay=False, metrics=Metrics(), timeline=Timeline("card"))
    assert sent == [{"g/0": 9, "g/1": 9}]


def test_a_stage_reports_what_drafts_have_saved_and_wasted():
    made = engine(max_length=64)
    made.scheduler.drafter = drafter = TextDrafter(SuffixIndexes())
    stage, found = engine_stage.EngineStage(made, LocalQueue(["train"]), drafter=drafter), []
    for turn in range(2):
        params, metrics = SamplingParams(max_tokens=40, stop_token_ids=(), temperature=0.5), Metrics()
        requests = [Request(f"g{turn}/{k}", (3, 4), params, group=f"g{turn}") for k in range(4)]
        stage.run(requests, stay=False, metrics=metrics, timeline=Timeline("card"))
        found.append(metrics.result())
    for row in found:
        drafted, accepted = row["rollout/drafted_tokens"], row["rollout/accepted_tokens"]
        assert row["rollout/wasted_tokens"] == drafted - accepted > 0 and accepted > 0
    totals = drafter.totals
    assert sum(row["rollout/wasted_tokens"] for row in found) == sum(totals.drafted) - sum(totals.accepted)
    assert sum(row["rollout/accepted_tokens"] for row in found) == sum(totals.accepted)
    first, second = (row["rollout/accepted_tokens"] / row["rollout/draft_accepted_length_mean"] for row in found)
    assert first + second == pytest.approx(totals.verified)
    assert "rollout/draft_acceptance_history" not in found[0] and "rollout/draft_acceptance_history" in found[1]
    assert 0 < found[0]["rollout/draft_hit_rate"] < 1 < found[0]["rollout/tokens_per_forward_mean"]
    assert found[0]["timing_s/draft"] > 0 and found[0]["rollout/draft_mib_max"] > 0


def _by_number(samples):
    return [(int(one.id[1:]), one) for one in samples]
