"""A whole run with Ascend's operators on emulated cards: stacks of experts are switched between two layouts."""

import pytest

from tests.stalesync.runs import FOUR, rows_of, train


@pytest.mark.extended
def test_a_run_with_the_operators_of_ascend(base, tmp_path):
    done = train(base, tmp_path, *FOUR, "device.operators=ascend", "run.steps=2", "fusion.checksum=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "operators: ascend" in done.stdout
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    # Engine and trainer call other operators for attention and gating, of the same meaning.
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows)


@pytest.mark.extended
@pytest.mark.parametrize(("deployment", "layouts"), [("colocated", "tp2ep2_ep4"), ("hybrid", "tp2ep2_ep2")])
def test_a_run_that_replays_decode_steps_trains_the_same(base, tmp_path, deployment, layouts):
    """Graphs are dropped at every switch, and captured again."""
    changes = [
        f"fusion={deployment}",
        "device.operators=ascend",
        "run.steps=2",
        f"parallel={layouts}",
        "rollout.max_response_length=24",
        "rollout.sampling.forced_median=20",
    ]
    rows = []
    for graphs in ("true", "false"):
        folder = tmp_path / graphs
        done = train(base, folder, *FOUR, *changes, f"rollout.engine.graphs={graphs}")
        assert done.returncode == 0, done.stdout + done.stderr
        rows.append(rows_of(folder / "run"))
    replayed, computed = rows
    assert [row["response_length/mean"] for row in replayed] == [row["response_length/mean"] for row in computed]
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in replayed)
    assert all(row["rollout/graph_steps"] > 5 for row in replayed)
    assert sum(row["rollout/graphs_dropped"] for row in replayed) >= replayed[0]["rollout/graphs_captured"] > 0
    assert not any("rollout/graph_steps" in row for row in computed)
