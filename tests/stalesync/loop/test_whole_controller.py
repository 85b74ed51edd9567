"""The whole controller, with its real parts, over cards and a queue that only hold names."""

import json

import pytest

from tests.stalesync.loop.named_cards import GROUP_SIZE, make_controller


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("groups", [4, 32])
def test_every_step_trains_its_groups_within_the_bound_and_leaves_a_row(groups, staleness, tmp_path):
    controller = make_controller(groups, staleness, tmp_path, num_cards=4, slots=16)
    for _ in range(4):
        controller.train_step()
    ledger = controller.admission.ledger
    assert ledger.ended["trained"] == 4 * groups and ledger.version == 4
    controller.folder.close()
    rows = [json.loads(line) for line in (controller.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3], "a step is logged when the next one has begun"
    lags = {key for row in rows for key in row if key.startswith("staleness/lag_") and row[key]}
    assert lags <= {f"staleness/lag_{lag}_count" for lag in range(staleness + 1)}
    for row in rows:  # of the step alone
        counts = [row[f"staleness/lag_{lag}_count"] for lag in range(staleness + 1)]
        mean = sum(lag * count for lag, count in enumerate(counts)) / sum(counts)
        largest = max(lag for lag, count in enumerate(counts) if count)
        assert (row["staleness/mean"], row["staleness/max"]) == (mean, largest)
    assert all(row["response_length/max"] <= 500 for row in rows) and GROUP_SIZE == 8
