"""Requests in a run's folder: what is taken, what is refused, what is recorded."""

import dataclasses

import pytest
import yaml

from fusion.telemetry.files import read_jsonl
from stalesync.job.config import Config
from stalesync.job.control import REQUEST, ControlDesk, submit


@pytest.fixture
def config():
    config = Config()
    config.cluster.npus, config.parallel.infer.tp = 4, 2
    config.data.max_prompt_length, config.rollout.max_response_length = 24, 8
    return config


@pytest.fixture
def folder(tmp_path, config):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    return tmp_path


def test_a_request_waits_for_the_next_step_and_is_recorded(folder, config):
    desk = ControlDesk(folder, config)
    assert desk.read(1, None) is None and desk.state_dict() is None
    submit(folder, {"engines": "1"})
    share = submit(folder, {"rollout.engine.kv_fraction": "0.3"})
    assert share.engines == (1,) and share.kv_fraction == 0.3, "two requests before a step are one"
    assert "from step 3 generation has engines=1 rollout.engine.kv_fraction=0.3" in desk.read(3, 1000)
    assert desk.share == share and desk.read(4, 1000) is None and not (folder / REQUEST).exists()
    (row,) = read_jsonl(folder / "control.jsonl")
    assert (row["step"], row["outcome"], row["share"]) == (3, "applied", share.state())
    again = ControlDesk(folder, config)
    again.load_state_dict(desk.state_dict())
    assert again.share == share, "a run that goes on goes on with it"
    other = ControlDesk(folder, dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, npus=2)))
    other.load_state_dict(desk.state_dict())
    assert other.share == dataclasses.replace(share, engines=(0,)), "with other engines, all of them"
    assert submit(folder, {"rollout.engine.max_seqs": "5"}).engines == (1,), "a later request changes what is in force"


def test_what_would_leave_no_room_for_a_sample_is_refused_and_the_run_goes_on(folder, config):
    desk = ControlDesk(folder, config)
    submit(folder, {"rollout.engine.kv_fraction": "0.01"})
    told = desk.read(2, 1000)
    assert "refused" in told and "about 11 tokens of KV cache, less than the longest sample" in told
    assert desk.share.kv_fraction == 0.9
    (row,) = read_jsonl(folder / "control.jsonl")
    assert row["outcome"].startswith("refused: rollout.engine.kv_fraction=0.01") and row["share"] == desk.share.state()


def test_a_request_that_does_not_fit_the_run_is_not_left(folder, tmp_path):
    with pytest.raises(ValueError, match="engines=2: expected all, or numbers of engines between 0 and 1"):
        submit(folder, {"engines": "2"})
    assert not (folder / REQUEST).exists()
    with pytest.raises(ValueError, match="expected the folder of a run"):
        submit(tmp_path / "nowhere", {"engines": "0"})
