"""Whole runs whose training cards share samples by context parallelism, one of them resumed with another number."""

import json

import pytest

from tests.stalesync.runs import kill, rows_of, train, wait_until

CP2 = ["cluster=four", "parallel.train.tp=2", "parallel.train.ep=2", "parallel.train.cp=2", "parallel.infer.ep=4"]
SAME = (
    "critic/rewards/mean",
    "response_length/mean",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
)
BEGINS_WITH_ONE = """
def score(prompt, response, answer, **fields):
    return float(response.strip().startswith("1"))
"""


@pytest.mark.parametrize("steps", [2, pytest.param(16, id="and-learn", marks=pytest.mark.extended)])
def test_cards_that_share_samples_begin_as_one_card_does(base, tmp_path, steps):
    """At staleness 0, with ratios of whole sequences; sums over other ranks are rounded otherwise."""
    (tmp_path / "reward.py").write_text(BEGINS_WITH_ONE)
    common = [f"reward.path={tmp_path / 'reward.py'}:score", "run.eval_prompts=0", "algorithm.name=gspo"]
    common += ["algorithm.clip_low=0.2", "algorithm.clip_high=0.2", "algorithm.kl_coef=0.001", "training.lr=2e-3"]
    common += ["algorithm.group_size=8", "training.load_balancing_coef=0.01"]
    rows, shares = {}, [*CP2, f"run.steps={steps}", "fusion.checksum=true"]
    for name, options in {"one": ["run.steps=2"], "shared": shares}.items():
        done = train(base, tmp_path, f"run.name={name}", *common, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        rows[name] = rows_of(tmp_path / name)
    for one, shared in zip(rows["one"], rows["shared"], strict=False):
        for figure in SAME:
            assert shared[figure] == pytest.approx(one[figure], rel=2e-3, abs=1e-5), (figure, one["step"])
    rewards = [row["critic/rewards/mean"] for row in rows["shared"]]
    if steps == 16:
        assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, rewards
    first = rows["shared"][0]
    requests, saved = (first[f"distqueue/read_requests_{name}"] for name in ("total", "saved_total"))
    assert saved == 3 * requests, "four cards of one replica read together"
    assert first["training/rollout_probs_diff_mean"] < 1e-5


@pytest.mark.extended  # the trainer's part: tests/training/test_checkpoint.py
def test_a_killed_run_resumes_with_another_number_of_cards_that_share_samples(base, start, tmp_path):
    folder = tmp_path / "run"
    common = ["run.save_every=1", "run.eval_prompts=0"]
    run = start(*CP2, *common, "run.steps=1000")
    wait_until(run, 60, lambda: list(folder.glob("checkpoints/step-*/manifest.json")) and len(rows_of(folder)) >= 3)
    kill(run)
    steps = max(row["step"] for row in rows_of(folder)) + 2
    four = ["cluster=four", "parallel.train.cp=4", "parallel.infer.ep=4"]
    done = train(base, tmp_path, *four, *common, f"run.steps={steps}", "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parallel.train.cp=4 (was 2)" in " ".join(done.stdout.split())
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows_of(folder)] == list(range(1, steps + 1))
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps, "none lost, none twice"


DCP2 = ["cluster=four", "parallel.train.tp=2", "parallel.train.ep=2", "parallel.infer.tp=4", "parallel.infer.ep=4"]
DCP2 += ["parallel.infer.dcp=2", "run.eval_prompts=0", "algorithm.group_size=8", "training.lr=2e-3"]


def test_engines_whose_cards_share_kv_generate_as_others_do(base, tmp_path):
    """At staleness 0 with chunks, whose KV is pooled meanwhile; in blocks of 32 tokens, 16 on each card. The first step
    is compared, those that share KV make another one."""
    (tmp_path / "reward.py").write_text(BEGINS_WITH_ONE)
    pool = ["rollout.kv_pool.suspended=pool", "rollout.schedule.chunk_tokens=8", "rollout.max_response_length=36"]
    pool += ["rollout.sampling.forced_median=18", "data.prompts_per_step=2"]
    common = [f"reward.path={tmp_path / 'reward.py'}:score", *DCP2, *pool]
    rows = {}
    for dcp in (1, 2):
        done = train(base, tmp_path, *common, f"run.name={dcp}", f"parallel.infer.dcp={dcp}", f"run.steps={dcp}")
        assert done.returncode == 0, done.stdout + done.stderr
        rows[dcp] = rows_of(tmp_path / str(dcp))
        assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows[dcp])
        assert sum(row["rollout/kv_pool_hits"] for row in rows[dcp]) > 0
        assert sum(row["rollout/kv_pool_damaged"] for row in rows[dcp]) == 0
    assert "block_size: 32" in (tmp_path / "2" / "config.yaml").read_text()
    for figure in ("critic/rewards/mean", "response_length/mean"):
        assert rows[2][0][figure] == pytest.approx(rows[1][0][figure], rel=2e-3, abs=1e-5), figure
