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
