"""What a start finds in the folder of its name: it resumes, starts, or is refused before anything there changes."""

import json
from types import SimpleNamespace

import pytest
import yaml

from fusion.model.box_checksum import MODULUS
from fusion.resources import RECIPES
from fusion.telemetry import RunFolder
from stalesync import launch
from stalesync.job import savepoint
from stalesync.job.config import Config, RunConfig
from stalesync.job.overrides import composed, load
from stalesync.job.resume import (
    Reopened,
    check_changes,
    check_resume,
    check_weights,
    find_other_content,
    new_folder,
    reopen,
    settings_of,
)
from stalesync.job.savepoint import NoWholeCheckpoint
from stalesync.process.run_log import Progress, RunLog, describe_failure
from tests.stalesync.job.test_savepoint import checkpoint


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", ["no folder", "an empty folder", "no checkpoints", "an unmarked checkpoint"])
def test_a_run_that_must_resume_is_refused_without_a_checkpoint_and_nothing_is_touched(tmp_path, left, monkeypatch):
    run = tmp_path / "runs" / "run"
    if left != "no folder":
        run.mkdir(parents=True)
    if left not in ("no folder", "an empty folder"):
        (run / "metrics.jsonl").write_text('{"step": 3}\n')
    if left == "an unmarked checkpoint":
        (checkpoint(run, 3) / "manifest.json").unlink()
    before = contents(tmp_path)
    config = Config(run=RunConfig(dir=str(tmp_path / "runs"), resume="true"))
    monkeypatch.setattr(Config, "validate", lambda self, trains: None)
    with pytest.raises(NoWholeCheckpoint, match="run.resume=true: expected a run with a complete checkpoint"):
        launch.launch(config)
    assert contents(tmp_path) == before and (tmp_path / "runs").exists() == (left != "no folder")


def test_auto_starts_where_nothing_is_to_be_resumed_and_keeps_what_an_earlier_start_left(tmp_path, capsys):
    run, config = tmp_path / "run", RunConfig(dir=str(tmp_path), resume="auto")
    assert reopen(config) is None
    with new_folder(config) as folder:
        assert folder.path == run and not folder.resumed
    assert f"nothing to resume, starting: new run folder {run}" in capsys.readouterr().out
    for number in (1, 2):
        (run / "metrics.jsonl").write_text('{"step": 3}\n')
        (run / "config.yaml").write_text(f"start: {number}\n")
        (checkpoint(run, 3) / "manifest.json").unlink()
        before = {name: data for name, data in contents(run).items() if "start-" not in str(name)}
        del before[(run / "lock.json").relative_to(run)]
        earlier = reopen(config)
        with earlier.folder as folder:
            assert earlier.checkpoint is None and not folder.resumed and folder.path == run
            (note,) = earlier.notes
            assert f"nothing to resume, starting in the run folder {run}; what an earlier start left is kept in" in note
            assert note in capsys.readouterr().out
        assert contents(run / f"start-{number}") == before
        assert sorted(path.name for path in run.iterdir()) == ["lock.json", *(f"start-{n + 1}" for n in range(number))]


def failed_start(folder):
    with RunFolder(folder.parent, folder.name, "resume"):
        RunLog(folder).write_failure(describe_failure(ValueError("no card"), Progress()), 0)


def test_a_name_whose_only_start_failed_is_used_again_and_what_it_left_is_kept(tmp_path, capsys):
    for number in (1, 2):
        failed_start(run := tmp_path / "run")
        before = {name: data for name, data in contents(run).items() if not str(name).startswith(("start-", "lock"))}
        with new_folder(RunConfig(dir=str(tmp_path))) as folder:
            assert folder.path == run and not folder.resumed
        assert contents(run / f"start-{number}") == before
        kept = f"starting in {run}, where a start has failed: what it left is kept in {run / f'start-{number}'}\n"
        assert capsys.readouterr().out == kept
        (run / "logs").mkdir()
    with RunFolder(tmp_path, "run"):
        failed_start(tmp_path / "run-3")
        with new_folder(RunConfig(dir=str(tmp_path))) as folder:
            assert folder.name == "run-3", "after run, which did not fail, and run-2, which is locked"


@pytest.mark.parametrize(
    "left",
    [
        "a row",
        "an evaluation",
        "a checkpoint",
        "an export",
        "no error",
        "a lock",
        "a link",
        "of others",
        "others write",
    ],
)
def test_a_folder_with_anything_but_a_failed_start_is_not_touched(tmp_path, left, monkeypatch):
    failed_start(run := tmp_path / "run")
    if left == "a checkpoint":
        (checkpoint(run, 3) / "manifest.json").unlink()
    elif name := {"a row": "metrics.jsonl", "an evaluation": "evaluations.jsonl", "an export": "hf/x"}.get(left):
        (run / "hf").mkdir()
        (run / name).write_text("{")
    elif left == "no error":
        (run / "error.json").unlink()
    elif left == "others write":
        run.chmod(0o770)
    elif left == "a link":
        run.symlink_to(run.rename(tmp_path / "elsewhere"))
    lock = RunFolder(tmp_path, "run", "resume") if left == "a lock" else None
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        if left == "of others":
            patch.setattr("os.geteuid", lambda: run.stat().st_uid + 1)
        with new_folder(RunConfig(dir=str(tmp_path))) as folder:
            assert folder.name == "run-2"
    assert {name: data for name, data in contents(tmp_path).items() if "run-2" not in str(name)} == before
    if lock is not None:
        lock.close()


@pytest.mark.parametrize("resume", ["true", "auto"])
def test_a_complete_checkpoint_is_resumed_and_a_newer_one_that_is_not_is_told(tmp_path, resume):
    run, config = tmp_path / "run", RunConfig(dir=str(tmp_path), resume=resume)
    checkpoint(run, 2)
    (checkpoint(run, 3) / "manifest.json").unlink()
    check_resume(config)
    earlier = reopen(config)
    with earlier.folder as folder:
        assert earlier.checkpoint == run / "checkpoints" / "step-2" and folder.resumed
        assert "step-3 has no manifest.json" in earlier.notes[0]
    assert reopen(RunConfig(dir=str(tmp_path))) is None, "a run that does not resume gets another folder"
    with new_folder(RunConfig(dir=str(tmp_path))) as folder:
        assert folder.name == "run-2"


def test_a_folder_whose_checkpoints_are_all_damaged_is_released_when_it_is_refused(tmp_path):
    config = RunConfig(dir=str(tmp_path), resume="auto")
    (checkpoint(tmp_path / "run", 2) / "queue" / "cut").unlink()
    with pytest.raises(NoWholeCheckpoint, match="is whole"):
        reopen(config)
    RunFolder(tmp_path, "run", "resume").close()


@pytest.mark.parametrize(("value", "read"), [("true", "true"), ("false", "false"), ("auto", "auto"), ("True", "true")])
def test_yamls_booleans_and_configs_of_earlier_versions_are_accepted(tmp_path, value, read):
    assert composed(RECIPES / "conf", [f"run.resume={value}"]).run.resume == read
    (tmp_path / "config.yaml").write_text(f"run:\n  resume: {value}\n")
    assert load(tmp_path / "config.yaml").run.resume == read
    assert RunConfig(resume=yaml.safe_load(value)).resume == read
    with pytest.raises(ValueError, match=r"run.resume='yes': expected one of false, true, auto"):
        RunConfig(resume="yes").validate()


@pytest.mark.parametrize(("saved", "masked"), [([], [[3, 5]]), ([[3, 5]], [[3, 5]]), (None, [[3, 5]])])
@pytest.mark.parametrize("groups", [0, 2])
def test_groups_in_progress_of_a_run_that_masked_other_ids_end_only_if_the_model_is_named(
    tmp_path, saved, masked, groups
):
    config = Config(run=RunConfig(dir=str(tmp_path), resume="true"))
    inputs = {"settings": settings_of(config), "files": {}, "masked_ids": masked}
    state = {"step": 2, "ledger": {"in_flight": dict.fromkeys("ab"[:groups], 0), "finished": {}}, "prompts": {}}
    if saved is not None:
        state["inputs"] = {**inputs, "masked_ids": saved}
    earlier = Reopened(RunFolder(tmp_path, "run", "resume"), checkpoint(tmp_path / "run", 2))
    savepoint.write_atomic(earlier.checkpoint / "controller.json", json.dumps(state))
    source = SimpleNamespace(find_other_order=lambda state: "")
    with earlier.folder:
        if saved == masked or not groups:
            assert check_changes(earlier, config, source=source, inputs=inputs).ended == ()
            return
        with pytest.raises(ValueError, match=r"model.path: cannot resume: 2 groups .*resume_changed=\[model.path\]"):
            check_changes(earlier, config, source=source, inputs=inputs)
        config.run.resume_changed = ["model.path"]
        resumed = check_changes(earlier, config, source=source, inputs=inputs)
        assert resumed.ended == ("a", "b") and "2 groups in progress end as failed:resume_changed" in resumed.notes
        assert ("written by an earlier version" in resumed.notes[0]) == (saved is None)


def test_a_model_that_differs_only_in_large_files_is_refused_when_the_cards_have_loaded_it(tmp_path):
    saved = {"checksums": {"policy": {"big": 3}, "reference": {"big": 3}}}
    earlier = Reopened(RunFolder(tmp_path, "run", "resume"), state={"inputs": saved})
    run, notes = RunConfig(resume="true"), []
    cards = [{"policy": {"big": 5}}, {"policy": {"big": MODULUS - 2}, "reference": {"big": 3}}, {"policy": {}}]
    with earlier.folder:
        assert check_weights(earlier, run, cards, notes.append) == saved["checksums"], "added up, mod MODULUS"
        cards[1]["reference"]["big"] = 4
        with pytest.raises(ValueError, match=r"^model.path: cannot resume: other content of big\. run.resume_changed"):
            check_weights(earlier, run, cards, notes.append)
        run.resume_changed = ["model.path"]
        assert check_weights(earlier, run, cards, notes.append)["reference"] == {"big": 4}
        cards[1]["reference"]["big"] = 3
        with pytest.raises(ValueError, match="run.resume_changed: model.path: expected only keys whose change"):
            check_weights(earlier, run, cards, notes.append)
        run.resume, notes[:] = "auto", []
        assert check_weights(earlier, run, cards, notes.append) == saved["checksums"]
        assert notes == ["run.resume_changed: model.path: not needed by this resume, and ignored"]


def test_checksums_of_an_earlier_version_are_not_compared_and_a_line_says_so(tmp_path):
    saved = {"weights": {"policy": {"big": 3}, "reference": {}}}
    earlier = Reopened(RunFolder(tmp_path, "run", "resume"), state={"inputs": saved})
    cards, notes = [{"policy": {"big": 5}}], []
    with earlier.folder:
        assert check_weights(earlier, RunConfig(resume="true"), cards, notes.append) == {"policy": {"big": 5}}
    assert notes == ["the checkpoint has checksums of an earlier version: of a large file, three pieces are compared"]


@pytest.mark.parametrize("resume", ["auto", "true"])
def test_a_name_left_in_the_job_script_does_not_refuse_the_next_automatic_restart(tmp_path, resume):
    config = Config(run=RunConfig(dir=str(tmp_path), resume=resume, resume_changed=["rollout.sampling.temperature"]))
    inputs = {"settings": settings_of(config), "files": {}, "masked_ids": []}
    before = {**inputs, "settings": {**inputs["settings"], "rollout.sampling.temperature": 0.5}}
    earlier = Reopened(RunFolder(tmp_path, "run", "resume"), checkpoint(tmp_path / "run", 2))
    source = SimpleNamespace(find_other_order=lambda state: "")

    def resumed(saved, groups):
        state = {
            "step": 2,
            "ledger": {"in_flight": dict.fromkeys(groups, 0), "finished": {}},
            "prompts": {},
            "inputs": saved,
        }
        savepoint.write_atomic(earlier.checkpoint / "controller.json", json.dumps(state))
        return check_changes(earlier, config, source=source, inputs=inputs)

    with earlier.folder:
        assert resumed(before, "ab").ended == ("a", "b"), "the resume that needs the name"
        if resume == "true":
            with pytest.raises(
                ValueError, match="run.resume_changed: rollout.sampling.temperature: expected only keys whose"
            ):
                resumed(inputs, "cd")
            return
        config.run.steps = 1
        with pytest.raises(ValueError, match=r"run\.steps=1: expected at least the 2 steps that are done"):
            resumed(inputs, "cd")
        config.run.steps = 2
        restarted = resumed(inputs, "cd")
        assert restarted.ended == () and restarted.notes == (
            "run.resume_changed: rollout.sampling.temperature: not needed by this resume, and ignored",
        )
        config.run.resume_changed = ["rollout.temprature"]
        with pytest.raises(ValueError, match="run.resume_changed: rollout.temprature: expected only keys whose change"):
            resumed(inputs, "cd")


def test_other_content_is_found_by_file_and_of_lists_only_where_an_entry_stays(tmp_path):
    old = {"model.path": {"a": "1", "b": "1"}, "eval.files": {"x": "1", "y": "1"}, "reward.path": {"": "1"}}
    new = {"model.path": {"a": "1", "c": "1"}, "eval.files": {"y": "2", "z": "1"}, "reward.path": {"": "2"}}
    assert find_other_content(old, old) == {}
    assert find_other_content(old, new) == {
        "model.path": "other content of b, c",
        "eval.files": "other content of y",
        "reward.path": "the file has other content",
    }
    assert "reward.path" not in find_other_content(old, new, changed=["reward.path"])
