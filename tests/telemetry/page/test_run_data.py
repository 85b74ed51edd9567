import json

import pytest

from fusion.telemetry import RunFolder
from fusion.telemetry.page import read_run
from tests.telemetry.page.runs import leave_a_run


def test_the_data_is_what_the_folder_holds(tmp_path):
    data = read_run(leave_a_run(tmp_path))
    assert json.loads(json.dumps(data)) == data, "plain JSON"
    assert (data["name"], data["outcome"], data["running"]) == ("run", "finished", False)
    assert (data["steps"], data["total_steps"], data["wall_s"]) == (20, 20, 90)
    assert (data["reward_start"], data["reward_end"]) == (pytest.approx(0.075), pytest.approx(0.975))
    assert data["curves"]["metrics"]["critic/rewards/mean"] == [step / 20 for step in range(1, 21)]
    assert data["cards"]["table"][1]["seconds"]["train"] == pytest.approx(10)
    assert data["memory"]["capacity"] == 2**23 and data["memory"]["peak"] == {"infer": 2**22, "train": 2**22}
    assert data["memory"]["owners"] == ["kv", "weights", "optimizer"]
    assert data["memory"]["by_owner"] == {"infer": [2**21, 0, 0], "train": [0, 2**20, 2**21]}
    assert data["staleness"] == {"lag": [0, 1], "groups": [20, 20]} and data["max_staleness"] == 1
    assert data["ended"] == {"trained": 40} and data["lengths"]["summary"]["all"]["responses"] == 80
    assert data["samples"]["before"][0]["response"] == "1" and data["samples"]["now"][0]["response"] == "20"
    assert data["samples"]["best"][0]["reward"] == 0.75 and data["samples"]["worst"][0]["reward"] == 0
    assert data["config"]["training.lr"] == "0.5" and data["cautions"] == []


def test_a_run_in_progress_an_empty_and_a_failed_one(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        data = read_run(run.path)
        assert (data["running"], data["outcome"], data["steps"]) == (True, "running", 0)
        assert data["cards"] is data["memory"] is data["staleness"] is data["lengths"] is None
    assert read_run(run.path)["outcome"] == "ended early"
    failure = {"rank": 3, "stage": "train", "step": 4, "message": "no memory\nmore"}
    (run.path / "error.json").write_text(json.dumps(failure))
    data = read_run(run.path)
    assert data["outcome"] == "failed"
    assert data["cautions"] == ["the run failed: rank 3, stage train, step 4: no memory (run.log)"]


def test_a_torn_last_line_is_ignored_and_other_damage_named(tmp_path):
    folder = leave_a_run(tmp_path)
    for name in ("metrics", "groups", "samples"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 99, "re')
    assert read_run(folder)["steps"] == 20
    (folder / "groups.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="groups.jsonl, line 2"):
        read_run(folder)
    (folder / "groups.jsonl").unlink()
    (folder / "config.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="config.yaml: expected a mapping"):
        read_run(folder)


def test_values_of_unexpected_types_leave_their_part_empty(tmp_path):
    folder = leave_a_run(tmp_path, steps=1)
    (folder / "metrics.jsonl").write_text('{"step": "one", "critic/rewards/mean": 1.0, "a": [1], "not_finite": 3}\n')
    (folder / "groups.jsonl").write_text('{"step": null, "ended": [], "lag": "x", "response_tokens": ["a", -1, 2]}\n')
    (folder / "samples.jsonl").write_text('{"step": {}, "reward": "high", "prompt": 3}\n')
    data = read_run(folder)
    assert data["lengths"]["all"] == [1] and data["staleness"] is None and data["ended"] == {"[]": 1}
    assert data["samples"]["now"] == [{"step": None, "reward": None, "prompt": "3", "response": "None"}]
