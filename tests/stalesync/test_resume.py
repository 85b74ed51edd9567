"""What a start finds in the folder of its name: it resumes, starts, or is refused before anything there changes."""

import pytest
import yaml

from fusion.resources import RECIPES
from fusion.telemetry import RunFolder
from stalesync import launch
from stalesync.config import Config, RunConfig
from stalesync.overrides import composed, load
from stalesync.resume import check_resume, new_folder, reopen
from stalesync.savepoint import NoWholeCheckpoint
from tests.stalesync.test_savepoint import checkpoint


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
            assert f"nothing to resume, starting in {run}; what an earlier start left is kept in" in note
            assert note in capsys.readouterr().out
        assert contents(run / f"start-{number}") == before
        assert sorted(path.name for path in run.iterdir()) == ["lock.json", *(f"start-{n + 1}" for n in range(number))]


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
