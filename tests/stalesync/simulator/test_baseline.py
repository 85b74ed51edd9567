"""The published baseline, term by term: pure arithmetic, nothing fitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.simulator.baseline import PUBLISHED_RATIO, BaselineStep, rows, terms
from stalesync.simulator.command_line import answer

JOB = BaselineStep(
    weight_bytes=1438e9,
    samples=4096,
    mean_tokens=4342.0,
    padded_tokens=17408.0,
    link_bytes_per_s=22.5e9,
    train_s=380.0,
    step_s=2380.0,
    colocated_s=2074.0,
)
POSITIVE = st.floats(1, 1e6)


@given(POSITIVE, POSITIVE, POSITIVE, st.floats(1, 10))
def test_terms_only_make_the_baseline_slower(train_s, step_s, colocated_s, padding):
    job = replace(JOB, train_s=train_s, step_s=step_s, colocated_s=colocated_s, padded_tokens=JOB.mean_tokens * padding)
    found = rows(job)
    assert all(term.seconds >= 0 and term.source for term in terms(job))
    assert found[0].ratio == pytest.approx(step_s / colocated_s), "without terms, what was simulated"
    ratios = [row.ratio for row in found]
    assert ratios == sorted(ratios) and all(row.gap * row.ratio == pytest.approx(PUBLISHED_RATIO) for row in found)


def test_each_term_follows_from_its_source():
    seconds = {term.name: term.seconds for term in terms(JOB)}
    assert seconds["weights by broadcast"] == pytest.approx(1.438 * 53.3)
    assert seconds["a padded queue that all ranks read"] == pytest.approx(4096 * 17408 * 24 * 128 / 22.5e9)
    assert seconds["training on padded samples"] == pytest.approx(380 * (17408 / 4342 - 1))
    assert {term.name: term.seconds for term in terms(replace(JOB, padded_tokens=JOB.mean_tokens))}[
        "training on padded samples"
    ] == 0, "samples of one length need no padding"


def test_simulate_prints_the_baseline_where_both_deployments_of_the_published_model_are_simulated(tmp_path, capsys):
    job = """model=pangu_718b cluster=cloudmatrix384 run.steps=2 data.prompts_per_step=96
    rollout.max_response_length=128 rollout.sampling.forced_median=32""".split()
    answer([*job, "fusion=separate,colocated", "--json", str(tmp_path / "a.json")], Path("recipes"))
    found = json.loads((tmp_path / "a.json").read_text())
    speeds = {row["deployment"]: row["step_s"] for row in found["rows"]}
    assert found["baseline"][0]["ratio"] == pytest.approx(speeds["separate"] / speeds["colocated"])
    assert "published baseline as it was" in capsys.readouterr().out
    other = "model=olmoe_7b cluster.hardware=ascend_910c cluster.npus=8 fusion=separate,colocated".split()
    for one in (job, [*other, *job[2:]]):
        answer([*one, "--json", str(tmp_path / "a.json")], Path("recipes"))
        assert json.loads((tmp_path / "a.json").read_text())["baseline"] == []
        assert "published baseline" not in capsys.readouterr().out
