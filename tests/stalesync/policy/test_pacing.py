from stalesync.job.config import Config
from stalesync.policy.pacing import PaceTally


def _tally(overrun):
    config = Config()
    config.device.kind, config.device.pace, config.cluster.hardware = "emulated", "qwen3_30b_a3b", "ascend_910c"
    tally = PaceTally(config.pace)
    for _ in range(2):
        tally.count({"pace/modelled_s/decode": 8.0, "pace/modelled_s/train": 1.0, "pace/waited_s": 1.0} | overrun)
    return tally


def test_a_run_that_kept_its_pace_says_which_it_was():
    (note,) = _tally({"pace/overrun_s/decode": 0.2, "pace/overrun_s/between": 0.05}).notes()
    assert "qwen3_30b_a3b on ascend_910c" in note and "overrun 2.5%" in note and "INVALID" not in note


def test_a_run_that_did_not_calls_itself_invalid_and_says_where_time_went():
    (note,) = _tally({"pace/overrun_s/decode": 0.2, "pace/overrun_s/between": 0.2}).notes()
    assert "INVALID: overrun 4.0%, above 3%" in note and "decode 0.4 s" in note and "device.pace_speed" in note


def test_a_run_without_a_pace_says_nothing():
    assert PaceTally(None).notes() == [] and PaceTally(None).overrun == 0
