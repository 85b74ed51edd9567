from dataclasses import replace

import pytest

from fusion.colocate.share import InferenceShare
from tests.rollouts import rollout_config

CONFIG = rollout_config(max_seqs=8, max_batch_tokens=16, kv_fraction=0.9)


def _change(wishes, longest=40):
    return InferenceShare.of(CONFIG, 4).changed(wishes, CONFIG, engines=4, max_tokens=longest)


def test_a_share_starts_as_the_config_says_and_changes_key_by_key():
    start = InferenceShare.of(CONFIG, 4)
    assert start.engines == (0, 1, 2, 3) and start.rollout(CONFIG) == CONFIG
    share = _change({"engines": "2,0", "rollout.engine.kv_fraction": "0.5", "rollout.engine.max_seqs": "64"})
    assert share.engines == (0, 2), "ascending"
    rollout = share.rollout(CONFIG)
    assert (rollout.engine.kv_fraction, rollout.engine.max_seqs, rollout.engine.max_batch_tokens) == (0.5, 64, 64)
    assert start.changed(share.state(), CONFIG, engines=4, max_tokens=40) == share, (
        "what a checkpoint holds brings it back"
    )
    assert share.changed(
        {"engines": "all", "rollout.engine.max_kv_tokens": "48"}, CONFIG, engines=4, max_tokens=40
    ).engines == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (
            {"rollout.sampling.top_k": "3"},
            "'rollout.sampling.top_k' cannot be changed during a run; expected one of engines, ",
        ),
        ({"engines": "0,4"}, r"engines=0,4: expected all, or numbers of engines between 0 and 3 \(0,2\)"),
        ({"engines": ""}, "engines=: expected all"),
        ({"rollout.engine.kv_fraction": "1.5"}, r"rollout.engine.kv_fraction=1.5: expected a number in \(0, 1\]"),
        ({"rollout.engine.kv_fraction": "half"}, r"rollout.engine.kv_fraction=half: expected a number in \(0, 1\]"),
        ({"rollout.engine.max_seqs": "0"}, "rollout.engine.max_seqs=0: expected a whole number of at least 1"),
        (
            {"rollout.engine.max_kv_tokens": "47"},
            "rollout.engine.max_kv_tokens=47: expected null, or at least the longest sample",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_key(wishes, message):
    with pytest.raises(ValueError, match=message):
        _change(wishes)


def test_with_vllm_as_the_engine_the_number_of_sequences_is_not_raised():
    config = replace(CONFIG, backend="vllm")
    start = InferenceShare.of(config, 4)
    fewer = {"rollout.engine.max_seqs": config.engine.max_seqs - 1}
    assert start.changed(fewer, config, engines=4, max_tokens=1).max_seqs == config.engine.max_seqs - 1
    with pytest.raises(
        ValueError,
        match=rf"rollout.engine.max_seqs={config.engine.max_seqs + 1}: expected at most {config.engine.max_seqs}",
    ):
        start.changed({"rollout.engine.max_seqs": config.engine.max_seqs + 1}, config, engines=4, max_tokens=1)
