"""Rewards of several terms in a run: what is refused before the start, what is logged, what is evaluated."""

import json

import pytest

from fusion.rewards import RewardConfig, RewardOutcome
from fusion.rewards.terms import start_terms
from fusion.telemetry import Metrics
from stalesync.loop.sample_columns import SampleColumns
from stalesync.loop.step_metrics import add_sample_metrics
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample
from stalesync.scoring.sources import WeightedReward
from tests.stalesync.runs import rows_of, train

PROMPT = Prompt("g", (1,), "p", "a")
LENGTH = {"reward": "length", "free_tokens": 2, "max_tokens": 4, "weight": 2.0}
REWARDS = """
def polite(prompt, response, answer):
    return 0.3
"""


class Base:
    """Rewards the number of tokens; fails for samples without text."""

    concurrent = False

    def __call__(self, samples):
        return [RewardOutcome(float(one.response_tokens), None if one.response else "raised") for one in samples]

    def take_reports(self):
        return ["report"]


def scored(samples):
    terms = start_terms(RewardConfig(terms=[LENGTH]), start=None)
    weighted = WeightedReward(Base(), "base", terms)
    assert not weighted.concurrent and weighted.take_reports() == ["report"]
    for sample, outcome in zip(samples, weighted(samples), strict=True):
        sample.outcome = outcome
    return samples


def test_groups_without_a_signal_and_constant_terms_are_counted():
    samples = []
    for group, rewards in {"a": [1.0, 1.0], "b": [0.1 + 0.2, 0.3], "c": [0.0, 1.0], "d": [0.0, None]}.items():
        for number, reward in enumerate(rewards):
            sample = Sample(f"{group}/{number}", Prompt(group, (1,), "1+1=", "2"), "2", 1, 3)
            terms = None if reward is None else {"judge": reward, "format": 1.0}
            sample.outcome = RewardOutcome(reward, None if reward is not None else "raised", terms=terms)
            sample.cut = number == 1
            samples.append(sample)
    metrics = Metrics()
    add_sample_metrics(metrics, SampleColumns.of(samples), by_group=True)
    found = metrics.result()
    assert found["frac_reward_zero_std"] == 0.75 and found["response_length/clip_ratio"] == 0.5
    assert found["critic/rewards/format/std"] == 0.0 < found["critic/rewards/judge/std"]
    assert found["reward/failed_share"] == 1 / 8
    add_sample_metrics(metrics := Metrics(), SampleColumns.of(samples), by_group=False)
    assert "frac_reward_zero_std" not in metrics.result(), "groups of equal rewards teach where all are compared"


def test_terms_are_added_with_their_weights_logged_by_name_and_saved_with_the_sample():
    samples = scored([Sample(f"g/{tokens}", PROMPT, "text", 1, tokens) for tokens in (2, 3, 4)])
    assert [one.outcome.reward for one in samples] == [2.0, 3.0 - 1.0, 4.0 - 2.0]
    assert samples[1].outcome.terms == {"base": 3.0, "length": -0.5}
    metrics = Metrics()
    add_sample_metrics(metrics, SampleColumns.of(samples), by_group=True)
    found = metrics.result()
    assert found["critic/rewards/mean"] == 2.0
    assert (found["critic/rewards/base/mean"], found["critic/rewards/length/mean"]) == (3.0, -0.5)
    restored = Sample.restore(PROMPT, json.loads(json.dumps(samples[1].state_dict())))
    assert restored == samples[1] and restored.outcome == samples[1].outcome


def test_a_run_trains_the_sum_and_an_evaluation_scores_by_it_or_by_the_reward_that_its_file_names(base, tmp_path):
    (file := tmp_path / "mine.py").write_text(REWARDS)
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"prompt": f"{n}+3=", "answer": n + 3}) + "\n" for n in range(6)))
    shapes = "{reward: format, pattern: '[0-9]+', weight: 0.5},{reward: length, free_tokens: 1, max_tokens: 5}"
    files = f"[{{path: {sums}, name: own}},{{path: {sums}, name: bare, reward: arithmetic}}]"
    done = train(base, tmp_path, f"reward.terms=[{shapes},'{file}:polite']", f"eval.files={files}", "run.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    for row in rows_of(tmp_path / "run"):
        parts = {name: row[f"critic/rewards/{name}/mean"] for name in ("arithmetic", "format", "length", "polite")}
        assert parts["polite"] == pytest.approx(0.3) and -1 <= parts["length"] <= 0 <= parts["format"] <= 1
        total = parts["arithmetic"] + 0.5 * parts["format"] + parts["length"] + parts["polite"]
        assert row["critic/rewards/mean"] == pytest.approx(total)
    last = rows_of(tmp_path / "run")[-1]
    assert last["val-core/held_out/reward/pass@1"] == last["val-aux/held_out/reward/arithmetic/mean@1"]
    assert last["val-aux/held_out/reward/polite/mean@1"] == pytest.approx(0.3)
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    weights = {"arithmetic": 1, "format": 0.5, "length": 1, "polite": 1}
    assert sample["reward"] == pytest.approx(sum(weights[name] * part for name, part in sample["terms"].items()))
    evaluated = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    rewards = {row["file"]: row["reward"] for row in evaluated}
    own = "arithmetic + 0.5 format + 1 length + 1 polite"
    assert rewards == {"held_out": own, "own": own, "bare": "arithmetic"}
    for row in evaluated:
        for answer in row["answers"]:
            exact = float(answer["response"] == str(int(answer["prompt"][0]) + int(answer["prompt"][2])))
            is_whole = answer["reward"] % 1 == 0  # no sum is
            assert answer["reward"] == exact if row["file"] == "bare" else not is_whole
