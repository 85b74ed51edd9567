"""What enters the controller: text, and a small constant of metadata a sample; no token, in any deployment."""

import json

import pytest

from tests.colocate.cards import tiny_reward_model
from tests.stalesync.runs import command_of, rows_of
from tests.warm import launcher

RESPONSE = 48
"""Tokens of the longest response: its int64 tokens alone are more than the metadata that a sample may cost."""

SAMPLE_METADATA = 400
"""Bytes: id, group, versions, length and place of a sample, and the frame of a message that brings it alone"""

ITEM_BYTES = 160
"""Bytes of a stage report for each sample that it describes: an id, a few numbers, an outcome"""

DEPLOYMENTS = ("colocated", "separate", "hybrid", "full")
DEFAULT = ("full", "model")
CASES = [(deployment, reward) for deployment in DEPLOYMENTS for reward in ("rule", "model")]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return tiny_reward_model(tmp_path_factory.mktemp("judge"))


@pytest.mark.parametrize(
    ("deployment", "reward"),
    [case if case == DEFAULT else pytest.param(*case, marks=pytest.mark.extended) for case in CASES],
)
def test_the_controller_receives_text_and_lengths_and_no_token(base, judge, tmp_path, deployment, reward):
    options = [
        f"fusion={deployment}",
        "cluster.npus=2",
        "parallel=single",
        "run.steps=2",
        "rollout.schedule.chunk_tokens=16",
    ]
    options += [
        f"rollout.max_response_length={RESPONSE}",
        f"rollout.sampling.forced_median={RESPONSE}",
        "run.eval_prompts=4",
    ]
    options += ["stalesync.max_staleness=1", "algorithm.kl_coef=0.01", "rollout.drafts.source=both"]
    options += [f"reward.model={judge}"] if reward == "model" else []
    (_, *overrides), counts = command_of(base, tmp_path, *options), tmp_path / "counts.json"
    done = launcher().session().run(["tests/stalesync/counted_run.py", str(counts), *overrides], 180)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(counts.read_text())
    assert sum(row["response_length/mean"] for row in rows_of(tmp_path / "run")) / 2 > RESPONSE / 2

    assert found["queue_bytes"].keys() == {"text", "cut"}, "tokens and log-probabilities stay where they are"
    assert found["queue_bytes"]["cut"] == found["samples"], "a byte: whether the limit ended the response"
    metadata = found["queue_total_bytes"] - sum(found["queue_bytes"].values())
    assert found["samples"] >= 64 and metadata < SAMPLE_METADATA * found["samples"], metadata / found["samples"]
    assert {"answer"} <= {stage for stage, *_ in found["reports"]}
    for stage, size, items, texts in found["reports"]:
        assert size - texts < ITEM_BYTES * (items + 2), (stage, size, items, texts)
