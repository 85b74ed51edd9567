"""When failed rewards end a run: by share, over enough samples, with the first failure's text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distqueue import LocalQueue
from fusion.rewards import RewardOutcome
from stalesync.process.failures import RewardsFailed, RunFailed
from stalesync.scoring.failed_rewards import MIN_SAMPLES, WINDOW, FailedRewards
from stalesync.scoring.scoring import Scorer
from tests.stalesync.scoring.test_scoring import PROMPT, Source, _poll, _put

GOOD = RewardOutcome(1.0)


def failed(detail="no such judge", error="raised"):
    return RewardOutcome(None, error, detail)


def outcomes(flags):
    return [failed(f"failure of sample {index}") if flag else GOOD for index, flag in enumerate(flags)]


def verdict_index(flags, max_share):
    """The sample at which the run is ended."""
    rewards = FailedRewards(max_share)
    for index, outcome in enumerate(outcomes(flags)):
        if rewards.observe([outcome]):
            return index
    return None


@given(st.lists(st.booleans(), max_size=600), st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]), st.data())
def test_invariants(flags, max_share, data):
    def exceeds(end):
        window = flags[max(0, end - WINDOW) : end]
        return sum(window) > max_share * len(window)

    expected = next((end - 1 for end in range(MIN_SAMPLES, len(flags) + 1) if exceeds(end)), None)
    assert verdict_index(flags, max_share) == expected
    whole, rest = FailedRewards(max_share), outcomes(flags)
    verdicts = []
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        verdicts.append(whole.observe(rest[:count]))
        rest = rest[count:]
    assert any(verdicts) == (expected is not None)
    assert bool(whole.judge()) == (bool(flags) and exceeds(len(flags)))
    if first := next((verdict for verdict in verdicts if verdict), None):
        assert f"failure of sample {flags.index(True)}" in str(first)


def test_a_run_in_which_all_fail_ends_early_and_one_in_which_few_fail_does_not():
    assert verdict_index([True] * 1000, 0.5) == MIN_SAMPLES - 1
    assert verdict_index([index % 100 == 0 for index in range(10_000)], 0.5) is None
    assert verdict_index([True] * 31 + [False] * 1000, 0.5) is None, "a bad start"
    assert verdict_index([True] * 10_000, 1.0) is None
    assert verdict_index([False] * 5000 + [True] * 200, 0.5) == 5000 + WINDOW // 2


def test_the_verdict_names_the_key_the_numbers_and_the_first_failure():
    rewards = FailedRewards(0.5)
    rewards.observe([failed("KeyError: 'level'"), *[failed("slow", "timeout")] * 2, GOOD])
    assert str(rewards.judge()) == (
        "reward.max_failed_share=0.5: 3 of the last 4 samples could not be scored (1 raised, 2 timeout). The first "
        "failure (raised):\nKeyError: 'level'"
    )


class Failing(Source):
    def __call__(self, samples):
        return [failed() for _ in samples]


@pytest.mark.parametrize("concurrent", [True, False])
def test_the_call_that_scores_or_polls_raises(concurrent):
    queue = LocalQueue(["reward", "train"])
    with Scorer(Failing(concurrent), queue, max_failed_share=0.5) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [1] * (MIN_SAMPLES - 1))
        if concurrent:
            _poll(scorer, (MIN_SAMPLES - 1, MIN_SAMPLES - 1))
        else:
            _poll(scorer, (MIN_SAMPLES - 1, 0))
            assert len(scorer.score_waiting()[0]) == MIN_SAMPLES - 1
        with pytest.raises(RewardsFailed, match="63 of the last 63 .*\n*no such judge"):
            scorer.check_failed()
        queue.put(_another(queue))
        with pytest.raises(RunFailed, match="reward.max_failed_share=0.5: 64 of the last 64 samples"):
            while True:
                scorer.poll(0.1)
                scorer.score_waiting()


def _another(queue):
    from fusion.rollout.packing import pack_outputs
    from tests.stalesync.scoring.test_scoring import _output

    return pack_outputs([_output("g/later", range(1))], ["x"])


def test_a_run_whose_rewards_succeed_ends_without_an_error():
    scorer = Scorer(Source(concurrent=True), LocalQueue(["reward", "train"]), max_failed_share=0.0)
    scorer.check_failed()
