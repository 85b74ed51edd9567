import math

import pytest

from fusion.telemetry import MemoryLedger
from fusion.telemetry.page.cautions import RECENT, CautionWatch, cautions


def found(rows=(), ended=None, memory=None, failure=None):
    return cautions(list(rows), ended or {}, memory or MemoryLedger(), failure)


GOOD = {
    "response_length/clip_ratio": 0.01,
    "critic/rewards/std": 0.4,
    "critic/rewards/format/std": 0.1,
    "frac_reward_zero_std": 0.3,
    "actor/grad_norm": 0.2,
    "training/skipped_updates": 0.0,
    "actor/entropy": 1.0,
    "perf/utilisation": 0.9,
    "rollout_corr/rollout_is_eff_sample_size": 0.9,
    "staleness/0/rollout_logprobs_diff_mean": 1e-4,
    "reward/failed": 0.0,
    "rollout/preemptions": 0.0,
}


def test_a_good_run_has_none():
    ledger = MemoryLedger()
    ledger.record("train", {}, 90, capacity=100)
    assert found([{"step": step, **GOOD} for step in range(1, 31)], {"trained": 5, "filtered:equal": 2}, ledger) == []
    assert found() == []


def test_a_conversation_may_also_be_cut_by_its_number_of_turns():
    (line,) = found([GOOD | {"response_length/clip_ratio": 1.0, "env/num_turns/mean": 3.0}])
    assert "at rollout.max_response_length or environment.max_turns at the end" in line and "end token" not in line


@pytest.mark.parametrize(
    ("metric", "value", "sentence"),
    [
        ("response_length/clip_ratio", 0.5, "50% of the responses are cut"),
        ("critic/rewards/std", 0.0, "nothing to learn"),
        ("frac_reward_zero_std", 0.9, "90% of the groups have equal rewards"),
        ("critic/rewards/format/std", 0.0, "the reward term 'format' is the same for all responses"),
        ("actor/grad_norm", 0.0, "the gradient is zero"),
        ("response_length/clip_ratio", 1.0, "none ends by itself: check the model's end token"),
        ("training/skipped_updates", 1.0, "3 updates were skipped"),
        ("actor/entropy", 0.01, "the entropy fell from 1 to 0.01"),
        ("perf/utilisation", 0.2, "busy only 20%"),
        ("rollout_corr/rollout_is_eff_sample_size", 0.1, "effective sample size is 10%"),
        ("staleness/0/rollout_logprobs_diff_mean", 0.2, "differ by 0.2 nats"),
        ("reward/failed", 3.0, "9 responses could not be scored"),
        ("rollout/preemptions", 1.0, "3 requests were preempted"),
    ],
)
def test_each_is_stated_with_its_metric(metric, value, sentence):
    rows = [{"step": step, **GOOD, **({metric: value} if step > 27 else {})} for step in range(1, 31)]
    [caution] = found(rows)
    assert sentence in caution and f"({metric})" in caution


def test_what_is_lost_full_or_failed():
    ledger = MemoryLedger()
    ledger.record("infer", {}, 96 << 20, capacity=100 << 20)
    rows = [{"step": 1}, {"step": 2, "a": None, "not_finite": {"a": "nan"}}, {"step": 3, "not_finite": {"a": "inf"}}]
    assert found(rows, {"trained": 1, "failed:timeout": 4}, ledger, "rank 3") == [
        "the run failed: rank 3",
        "a is not finite in 2 steps, first in step 2",
        "4 groups ended as failed:timeout (groups.jsonl)",
        "HBM was 96% full in the phase infer: 96.0M of 100M (memory/infer/peak_mib)",
    ]


def test_the_same_are_found_once_each_while_the_run_goes_on():
    watch = CautionWatch()
    good = [watch.observe(step, GOOD) for step in range(1, RECENT + 1)]
    assert not any(good)
    bad = GOOD | {"response_length/clip_ratio": 0.5, "frac_reward_zero_std": 0.95, "training/skipped_updates": 1.0}
    said = [line for step in range(11, 40) for line in watch.observe(step, bad | {"actor/grad_norm": math.nan})]
    assert len(said) == len(set(said)) == 4
    for part in ("actor/grad_norm is not", "updates were skipped", "responses are cut", "groups have equal rewards"):
        assert sum(part in line for line in said) == 1, part
    final = cautions([{"step": 1, **bad}], {}, MemoryLedger(), None)
    about = [line[line.rindex("(") :] for line in said if line.endswith(")")]
    assert sorted(about) == sorted(line[line.rindex("(") :] for line in final)


def test_what_one_step_shows_is_not_yet_a_caution():
    watch = CautionWatch()
    one_bad_step = [GOOD] * 20 + [GOOD | {"response_length/clip_ratio": 1.0}] + [GOOD] * 20
    assert not any(watch.observe(step, row) for step, row in enumerate(one_bad_step))
