"""Names of earlier versions: what was saved with them is read, and what is written with them is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fusion.resources import RECIPES
from fusion.telemetry import RunFolder
from stalesync.job import savepoint
from stalesync.job.config import Config
from stalesync.job.control import ControlDesk, submit
from stalesync.job.keys import value_of
from stalesync.job.other_names import MOVED, NOW, REMOVED
from stalesync.job.overrides import accepted, composed, known_keys, load
from stalesync.job.resume import Reopened, check_changes, settings_of
from tests.stalesync.job.test_savepoint import checkpoint

SAVED = Path(__file__).parents[1] / "data" / "flat_rollout.yaml"
"""A config.yaml whose group `rollout` is flat; no value is the default"""
SETTINGS = {f"rollout.{name}": value for name, value in yaml.safe_load(SAVED.read_text())["rollout"].items()}
"""As the checkpoints of that run have them"""


def test_every_old_name_has_a_key_and_none_is_one():
    assert {*MOVED.values()} <= {*known_keys()} and len({*MOVED.values()}) == len(MOVED)
    assert not NOW.keys() & {*known_keys()} and MOVED.keys() <= SETTINGS.keys() and REMOVED.keys() & SETTINGS.keys()


def test_a_saved_config_of_an_earlier_version_is_loaded_whole():
    config = load(SAVED)
    config.rollout.validate()
    assert {old: value_of(config, new) for old, new in MOVED.items()} == {old: SETTINGS[old] for old in MOVED}
    assert all(value_of(config, new) != value_of(Config(), new) for new in MOVED.values())
    assert (config.rollout.max_length, config.run.steps, config.stalesync.max_staleness) == (512, 4, 1)


def test_what_this_version_saves_is_loaded_as_it_is(tmp_path):
    config = load(SAVED)
    config.rollout.drafts.source = "siblings"
    with RunFolder(tmp_path, "run") as folder:
        folder.write_config(config)
        assert load(folder.path / "config.yaml") == config


def test_a_key_that_was_removed_is_ignored_where_it_was_saved(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rollout: {drafts: {budget: window, tree: 2}}\n")
    assert load(path).rollout.drafts.tree == 2


@pytest.mark.parametrize("where", ["checkpoint", "config.yaml"])
def test_a_run_of_an_earlier_version_resumes_and_only_what_has_changed_counts(tmp_path, where):
    config = load(SAVED)
    config.run.dir, config.run.resume = str(tmp_path), "true"
    inputs = {"settings": settings_of(config), "files": {}, "masked_ids": []}
    state = {"step": 2, "ledger": {"in_flight": {"a": 0}, "finished": {}}, "prompts": {}}
    if where == "checkpoint":
        renamed = {new: old for old, new in MOVED.items()}
        settings = {renamed.get(key, key): value for key, value in inputs["settings"].items()}
        state["inputs"] = {**inputs, "settings": settings | SETTINGS}
    earlier = Reopened(RunFolder(tmp_path, "run", "resume"), checkpoint(tmp_path / "run", 2))
    (tmp_path / "run" / "config.yaml").write_text(SAVED.read_text())
    savepoint.write_atomic(earlier.checkpoint / "controller.json", json.dumps(state))
    source = SimpleNamespace(find_other_order=lambda state: "")

    def resumed():
        inputs["settings"] = settings_of(config)
        return check_changes(earlier, config, source=source, inputs=inputs)

    with earlier.folder:
        if where == "checkpoint":
            assert resumed().notes == () and resumed().ended == ()
        config.rollout.engine.max_seqs, config.rollout.kv_pool.spread = 8, 4
        changed = resumed()
        assert "rollout.engine.max_seqs=8 (was 16)" in changed.notes[-1] and "spread=4 (was 8)" in changed.notes[-1]
        config.rollout.sampling.temperature = 0.7
        with pytest.raises(ValueError, match=r"rollout.sampling.temperature=0.7: cannot resume where .* with 0.5"):
            resumed()
        config.run.resume_changed = ["rollout.temperature"]
        with pytest.raises(ValueError, match=r"^rollout.temperature is rollout.sampling.temperature$"):
            resumed()
        config.run.resume_changed = ["rollout.sampling.temperature"]
        assert resumed().ended == ("a",)


def test_the_limits_of_generation_that_an_earlier_version_has_saved_stay_in_force(tmp_path):
    config = Config()
    (tmp_path / "config.yaml").write_text("run:\n  name: run\n")
    desk = ControlDesk(tmp_path, config)
    desk.load_state_dict(
        {"share": {"engines": "0", "rollout.max_seqs": 7, "rollout.kv_fraction": 0.4}, "num_engines": 1}
    )
    assert (desk.share.max_seqs, desk.share.kv_fraction) == (7, 0.4)
    with pytest.raises(ValueError, match=r"^rollout.max_seqs is rollout.engine.max_seqs$"):
        submit(tmp_path, {"rollout.max_seqs": "5"})


@pytest.mark.parametrize("old", NOW)
def test_an_old_name_on_a_command_line_is_refused_with_the_new_one(old):
    with pytest.raises(ValueError) as error:
        accepted([f"{old}=1"], RECIPES / "conf")
    assert str(error.value) == f"{old} is {NOW[old]}"


def test_an_old_name_in_a_users_file_is_refused_with_the_new_one(tmp_path):
    for path in (RECIPES / "conf").rglob("*.yaml"):
        copied = tmp_path / path.relative_to(RECIPES / "conf")
        copied.parent.mkdir(exist_ok=True)
        copied.write_text(path.read_text())
    (tmp_path / "rollout" / "mine.yaml").write_text("max_seqs: 4\n")
    for saved in (None, Config()):
        with pytest.raises(ValueError, match=r"^rollout.max_seqs is rollout.engine.max_seqs$"):
            composed(tmp_path, ["rollout=mine"], saved=saved)
