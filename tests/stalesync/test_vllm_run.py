"""Whole runs with rollout.backend=vllm: the embedded engine's first step, hybrid cards, kill and resume."""

import importlib.util

import pytest
import torch

from tests.stalesync.loop import test_engine_restarts as restarts
from tests.stalesync.loop.test_saving import _whole
from tests.stalesync.runs import FOUR, kill, rows_of, train, wait_until, weights_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="bash scripts/environment.sh --backend vllm"),
]

VLLM, MEGATRON = "rollout.backend=vllm", "training.backend=megatron"
OPTIONS = ["run.eval_prompts=0", "fusion.checksum=true", "training.lr=1e-3"]


def samples_of(run, step):
    """Lines of samples.jsonl of one step, without what is not computed bitwise alike."""
    return sorted(line for line in (run / "samples.jsonl").read_text().splitlines() if f'"step": {step},' in line)


@pytest.mark.parametrize("parallel", ["tp2ep2_ep4", "tp2ep2_ep2"])
def test_four_cards_generate_with_vllm_as_with_the_embedded_engine(base, luck, tmp_path, parallel):
    rows = {}
    for name, options in {"embedded": [], "vllm": [VLLM], "both": [VLLM, MEGATRON]}.items():
        options = [*options, "cluster=four", f"parallel={parallel}", "run.steps=2"]
        done = train(base, tmp_path, f"run.name={name}", *OPTIONS, luck, *options, timeout_s=400)
        assert done.returncode == 0, done.stdout + done.stderr
        rows[name] = rows_of(tmp_path / name)
    first = [samples_of(tmp_path / name, 1) for name in rows]
    assert first[0] and first[0] == first[1] == first[2], "the engines sample step 1 from the same weights"
    for name in ("vllm", "both"):
        one, other = rows["embedded"][0], rows[name][0]
        assert one["actor/grad_norm"] > 0.01 and one["critic/rewards/mean"] == other["critic/rewards/mean"]
        for figure in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
            assert other[figure] == pytest.approx(one[figure], rel=1e-4, abs=1e-6), figure
        assert all(row["training/rollout_logprobs_diff_mean"] < 1e-4 for row in rows[name]), "after every switch"
        assert other["memory/infer/optimizer_mib"] == other["memory/infer/gradients_mib"] == 0
        assert other["memory/infer/kv_mib"] > 0 and other["rollout/kv_tokens_min"] > 0
        assert other["rollout/generated_tokens"] == one["rollout/generated_tokens"]


@pytest.mark.parametrize("parallel", ["tp2ep2_ep4", "tp2ep2_ep2"])
def test_drafts_and_replayed_experts_are_those_of_a_run_on_the_embedded_engine(base, luck, tmp_path, parallel):
    """Responses go on behind the end token, where they repeat themselves."""
    drafts = [VLLM, "rollout.drafts.source=both", "rollout.schedule.chunk_tokens=8"]
    long = ["rollout.max_response_length=16", "rollout.sampling.forced_median=12", "rollout.sampling.temperature=0.5"]
    rows = {}
    for name, options in {"embedded": [], "vllm": drafts}.items():
        options = [*options, "cluster=four", f"parallel={parallel}", "run.steps=3", "data.rows=8"]
        options += ["algorithm.replay=rollout", *long]
        done = train(base, tmp_path, f"run.name={name}", *OPTIONS, luck, *options, timeout_s=400)
        assert done.returncode == 0, done.stdout + done.stderr
        rows[name] = rows_of(tmp_path / name)
    first = [samples_of(tmp_path / name, 1) for name in rows]
    assert first[0] and first[0] == first[1], "the engines sample step 1 from the same weights"
    one, other = rows["embedded"][0], rows["vllm"][0]
    for figure in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert other[figure] == pytest.approx(one[figure], rel=1e-4, abs=1e-6), figure
    for row in rows["vllm"]:
        assert row["training/rollout_logprobs_diff_mean"] < 1e-4 and row["training/routing_mismatch"] < 1e-3
    drafted, accepted = (sum(row[f"rollout/{name}_tokens"] for row in rows["vllm"]) for name in ("drafted", "accepted"))
    assert drafted > accepted > 20


@pytest.mark.parametrize("double_buffer", ["false", "true"])
def test_hybrid_cards_one_step_stale_with_chunks_and_weights_in_the_background(base, luck, tmp_path, double_buffer):
    """Cards that only generate decode while the others train, and adopt new weights between two steps."""
    options = [
        f"fusion.double_buffer={double_buffer}",
        "cluster=four",
        "parallel=tp2ep2_ep2",
        "fusion=hybrid",
        "stalesync.max_staleness=1",
        "run.steps=4",
    ]
    options += ["rollout.schedule.chunk_tokens=3", "rollout.max_response_length=8"]
    done = train(base, tmp_path, VLLM, *OPTIONS, luck, *options, timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 4 and all(0.001 < row["actor/grad_norm"] < 100 for row in rows)
    fresh, stale = ([row.get(f"staleness/{lag}/rollout_logprobs_diff_mean", 0) for row in rows] for lag in (0, 1))
    assert max(fresh) < 1e-4, "the weights of the version that a token is said to be of"
    assert 1e-3 < max(stale) < 0.5, "one update apart; how far depends on which samples came first"
    assert max(row["staleness/max"] for row in rows) == 1


def test_bfloat16_with_a_reference(base, luck, tmp_path):
    options = [VLLM, "model=bfloat16", "algorithm.kl_coef=0.01", *FOUR, "run.steps=2"]
    done = train(base, tmp_path, *OPTIONS, luck, *options, timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and all(0.01 < row["actor/grad_norm"] < 100 for row in rows)
    assert all(row["training/rollout_logprobs_diff_mean"] < 0.05 for row in rows)


@pytest.mark.parametrize("trainer", ["embedded", "megatron"])
def test_a_run_on_vllm_that_is_killed_and_resumed_is_bitwise_the_one_that_was_not(base, start, luck, tmp_path, trainer):
    options = [VLLM, f"training.backend={trainer}", *OPTIONS, luck, "cluster.npus=1", "parallel=single"]
    options += ["run.steps=6", "run.save_every=1"]
    whole = train(base, tmp_path / "whole", *options, timeout_s=400)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    run = start(*options)
    wait_until(run, 200, lambda: any(_whole(tmp_path / "run")))
    kill(run)
    done = train(base, tmp_path, *options, "run.resume=true", timeout_s=400)
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stdout + done.stderr
    figures = [
        [(row["critic/rewards/mean"], row["actor/grad_norm"]) for row in rows_of(folder / "run")]
        for folder in (tmp_path, tmp_path / "whole")
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 6 and all(norm > 0.01 for _, norm in figures[0])
    ours, theirs = (weights_of(folder / "run" / "hf") for folder in (tmp_path, tmp_path / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def test_an_engine_of_two_cards_that_is_killed_is_replaced(base, tmp_path):
    """vLLM starts again in processes that take part in no group of the run but those of their engine."""
    options = [VLLM, "rollout=sampling", "parallel.infer.tp=2", "parallel.infer.etp=2", "run.steps=3"]
    done, folder = restarts.run(base, tmp_path / "killed", *options, kills={40: [2]})
    assert done.returncode == 0, done.stdout + done.stderr
    assert restarts.restarts_of(folder) == 1 and "1 engines died and were replaced" in done.stdout
    rows = rows_of(folder)
    assert len(rows) == 3 and all(row["training/rollout_logprobs_diff_mean"] < 1e-4 for row in rows)
