"""Which checkpoint a run resumes from, and which it removes: folders alone, no run."""

import json
import random

import pytest

from stalesync.job import savepoint
from stalesync.job.savepoint import NoWholeCheckpoint

FILES = {
    "controller.json": b"",
    "trainer/rank-00000.safetensors": bytes(range(256)),
    "trainer/trainer.json": b"{}",
    "trainer/tensors.json": b"{}",
    "trainer/manifest.json": b"",
    "queue/index.db": b"SQLite format 3",
    "queue/segments/0": bytes(500),
    "queue/cut": b"cut",
    "drafts/rank-00000.bin": b"history",
    "manifest.json": b"",
}


def checkpoint(run, step):
    """As a run writes one."""
    from fusion.telemetry.manifest import write_manifest

    target = run / "checkpoints" / f"step-{step}"
    savepoint.begin(target, None)
    for name, data in FILES.items():
        if data:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)
    write_manifest(target / "trainer", {})
    savepoint.finish(target, json.dumps({"step": step}))
    return target


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_of_any_file_is_named_and_the_run_goes_back_to_the_newest_whole_checkpoint(
    tmp_path, name, caplog
):
    chance = random.Random(name)
    for step in (1, 2):
        checkpoint(tmp_path, step)
    assert savepoint.newest(tmp_path) == (tmp_path / "checkpoints" / "step-2", [])
    path = tmp_path / "checkpoints" / "step-2" / name
    whole = path.read_bytes()
    for _ in range(8):
        flipped, bit = bytearray(whole), chance.randrange(8 * len(whole))
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        (tmp_path / "checkpoints" / "step-1").rename(tmp_path / "away")
        with pytest.raises(NoWholeCheckpoint, match=rf"no checkpoint in .* is whole \(step-2: {name} "):
            savepoint.newest(tmp_path)
        assert names(tmp_path) == ["step-2"], "nothing is renamed when there is none to go back to"
        (tmp_path / "away").rename(tmp_path / "checkpoints" / "step-1")
    resumed, (line,) = savepoint.newest(tmp_path)
    assert resumed.name == "step-1" and names(tmp_path) == ["step-1", "step-2.damaged"]
    assert f"step-2 is damaged: {name} " in line and "Going back to step-1" in line and line in caplog.text
    assert savepoint.newest(tmp_path) == (resumed, []), "told once"


def test_a_damaged_one_is_not_one_of_those_that_are_kept(tmp_path):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step-3" / "queue" / "cut").unlink()
    assert savepoint.newest(tmp_path)[0].name == "step-2"
    checkpoint(tmp_path, 3)
    (tmp_path / "checkpoints" / "step-3" / "queue" / "cut").unlink()
    assert savepoint.newest(tmp_path)[0].name == "step-2"
    savepoint.prune(tmp_path / "checkpoints", 1)
    assert names(tmp_path) == ["step-2", "step-3.damaged", "step-3.damaged-2"]


@pytest.mark.parametrize("copy", ["step-4-good", "step-", "step-04", "step-4.bak", "step-4a", "step--4", "step-٤"])
def test_a_copy_of_another_name_is_neither_resumed_nor_removed_and_does_not_count(tmp_path, copy):
    for step in (2, 4, 5, 6):
        checkpoint(tmp_path, step)
    checkpoints = tmp_path / "checkpoints"
    checkpoint(tmp_path, 7).rename(checkpoints / copy)
    (checkpoints / "step-1").mkdir()
    assert savepoint.newest(tmp_path)[0].name == "step-6"
    savepoint.prune(checkpoints, 2)
    assert names(tmp_path) == sorted([copy, "step-5", "step-6"])
    savepoint.prune(checkpoints, 0)
    assert names(tmp_path) == sorted([copy, "step-5", "step-6"])


def test_the_best_checkpoint_is_kept_besides_the_newest_and_is_gone_when_another_one_is_the_best(tmp_path):
    for step in (2, 4, 5, 6):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step-3").mkdir()
    savepoint.prune(tmp_path / "checkpoints", 2, spared=[2])
    assert names(tmp_path) == ["step-2", "step-5", "step-6"] and savepoint.newest(tmp_path)[0].name == "step-6"
    savepoint.prune(tmp_path / "checkpoints", 2, spared=[6])
    assert names(tmp_path) == ["step-5", "step-6"]


def test_a_newer_checkpoint_that_is_not_complete_is_named_and_kept_if_it_lacks_only_its_mark(tmp_path, caplog):
    checkpoint(tmp_path, 2)
    (checkpoint(tmp_path, 3) / "manifest.json").unlink()
    written = checkpoint(tmp_path, 4)
    for name in ("manifest.json", "controller.json"):
        (written / name).unlink()
    (checkpoint(tmp_path, 1) / "manifest.json").unlink()
    resumed, (unmarked, interrupted) = savepoint.newest(tmp_path)
    assert resumed.name == "step-2" and names(tmp_path) == ["step-1", "step-2", "step-3.unmarked", "step-4"]
    assert "step-3 has no manifest.json. Going back to step-2; it is kept as" in unmarked and unmarked in caplog.text
    assert "step-4 has no manifest.json, and its save was interrupted. Going back to step-2" in interrupted
    assert interrupted in caplog.text


@pytest.mark.parametrize("has", ["nothing", "folder", "unmarked"])
def test_a_run_without_a_complete_checkpoint_is_refused_with_what_it_has_and_similar_names(tmp_path, has):
    checkpoint(tmp_path / "killed-2", 3)
    expected = "killed does not exist"
    if has == "folder":
        (tmp_path / "killed").mkdir()
        expected = "killed/checkpoints has none"
    elif has == "unmarked":
        (checkpoint(tmp_path / "killed", 3) / "manifest.json").unlink()
        expected = "step-3 has no manifest.json"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NoWholeCheckpoint, match=rf"{expected}. Did you mean run.name=killed-2\? \(run.resume=auto "):
        savepoint.newest(tmp_path / "killed")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(tmp_path):
    old = checkpoint(tmp_path, 3)
    (old / "manifest.json").unlink()
    (old / "trainer" / "rank-00000.pt").touch()
    with pytest.raises(NoWholeCheckpoint, match=r"step-3 was written by an earlier version.* model.path=.*hf"):
        savepoint.newest(tmp_path)
