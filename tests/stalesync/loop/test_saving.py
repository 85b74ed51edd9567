"""Checkpoints are written during the run: whole runs on a slow or a full disk, and the thread that writes."""

import json
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from stalesync.loop.checkpoints import SaveFailed, Saver
from stalesync.process.failures import CardFailed
from tests.machine import communicate, patience, within
from tests.stalesync.runs import kill, rows_of, train, wait_until

TWO = ["cluster.npus=2", "parallel=single", "run.eval_prompts=0"]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """disk.c, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler: the disk is played by a library that is preloaded")
    disk = tmp_path_factory.mktemp("disk") / "disk.so"
    source = str(Path(__file__).with_name("disk.c"))
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(disk), source, "-ldl"], check=True)
    return disk


@pytest.fixture
def gate(disk, tmp_path, monkeypatch):
    """While this file exists, nothing of a trainer's checkpoint gets to disk; see disk.c."""
    monkeypatch.setenv("LD_PRELOAD", str(disk))
    monkeypatch.setenv("DISK_GATE", str(tmp_path / "gate"))
    return tmp_path / "gate"


def _whole(folder):
    return sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))


@pytest.mark.extended
def test_steps_go_on_while_a_checkpoint_is_written_the_next_waits_and_a_killed_one_does_not_count(
    base,
    start,
    gate,
    tmp_path,
):
    folder, options = tmp_path / "run", [*TWO, "run.save_every=3", "run.keep=1"]
    gate.touch()
    run = start(*options, "run.steps=1000")
    wait_until(run, 60, lambda: len(rows_of(folder)) == 5)
    assert (folder / "checkpoints" / "step-3" / "trainer.partial").is_dir() and not _whole(folder)
    time.sleep(patience(1.5))
    assert len(rows_of(folder)) == 5, "the cut after step 6 waits"
    gate.unlink()
    wait_until(run, 60, lambda: _whole(folder))
    gate.touch()
    # One that is being written when the run is killed, behind one that counts.
    wait_until(run, 60, lambda: list(folder.glob("checkpoints/*/trainer.partial")))
    kill(run)
    gate.unlink()
    (kept,) = _whole(folder)
    rows, going_on = rows_of(folder), int(kept.removeprefix("step-"))
    assert rows[5]["timing_s/save/wait"] > 0.5 > rows[2]["timing_s/save"] > 0 and rows[5]["save/write_s"] > 1
    assert "timing_s/save" not in rows[3]
    done = train(base, tmp_path, *options, f"run.steps={going_on + 3}", "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {going_on}" in done.stdout and _whole(folder) == [f"step-{going_on + 3}"]
    assert [path.name for path in folder.glob("checkpoints/*")] == _whole(folder)
    assert [row["step"] for row in rows_of(folder)] == list(range(1, going_on + 4))
    assert not list(folder.glob("*.partial")) and (folder / "hf" / "config.json").is_file()


@pytest.mark.extended  # full disks in small: tests/distqueue/test_full_disk.py; a failing stage: test_stale_failures.py
def test_a_full_disk_ends_the_run_and_is_told_with_rank_and_stage(start, gate, tmp_path):
    run = start(*TWO, "run.steps=1000", "run.save_every=0.1s")
    wait_until(run, 60, lambda: _whole(tmp_path / "run"))
    full = time.monotonic()
    gate.with_name("gate.full").touch()
    out, err = communicate(run, 60)
    assert within(time.monotonic() - full, 30) and run.returncode == 1
    assert "error: rank 1 failed in stage 'save': " in err and "No space left on device" in err, err
    kept = _whole(tmp_path / "run")
    assert kept and json.loads((tmp_path / "run" / "checkpoints" / kept[-1] / "controller.json").read_text())


@pytest.mark.extended  # in small: tests/telemetry/test_full_disk.py
def test_a_full_disk_stops_logs_and_the_run_only_at_its_next_checkpoint(base, start, gate, tmp_path):
    folder, full = tmp_path / "run", gate.with_name("gate.none")
    run = start(*TWO, "run.steps=1000", "run.save_every=6")
    wait_until(run, 60, lambda: _whole(folder) == ["step-6"] and len(rows_of(folder)) > 6)
    full.touch()
    out, err = communicate(run, 60)
    rows = len(rows_of(folder))
    assert not (folder / "checkpoints" / "step-12").exists(), "it may be what fills the disk"
    assert run.returncode == 1 and rows < 12, (rows, err)
    assert "in stage 'save'" in err and "No space left on device" in err and "set run.dir" in err, err
    assert re.search(r"bytes to write, [\d,]+ bytes are free\): '\S+/checkpoints/step-12/", err), err
    for name in ("metrics.jsonl", "groups.jsonl", "samples.jsonl", "timeline.json", "controller.log"):
        (warning,) = [line for line in err.splitlines() if f"/{name}': the run continues" in line]
        assert warning in " ".join(out.split()), f"the report repeats it: {out}"
    full.unlink()
    done = train(base, tmp_path, *TWO, "run.steps=13", "run.save_every=6", "run.resume=true")
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stdout + done.stderr
    assert [row["step"] for row in rows_of(folder)] == [*range(1, 14)]


def test_what_goes_wrong_in_the_thread_that_writes_is_raised_at_the_next_look():
    saver, told = Saver(), threading.Event()

    def fail():
        told.wait()
        raise PermissionError(13, "Permission denied", "checkpoints/step-1")

    with saver.pause():
        pass
    discarded = []
    saver.begin(fail, lambda: discarded.append(True))
    saver.check()
    told.set()
    with pytest.raises(SaveFailed, match="stage 'save': PermissionError: .*Permission denied: 'checkpoints/step-1'"):
        saver.finish()
    with pytest.raises(SaveFailed) as raised:
        saver.check()
    assert discarded
    (note,) = raised.value.__notes__
    assert "a checkpoint could not be written" in note and "set run.dir" in note


def test_memory_that_a_checkpoint_has_freed_is_returned_to_the_system(monkeypatch):
    done = []
    monkeypatch.setattr("stalesync.loop.checkpoints.release_freed", lambda: done.append("released"))
    saver = Saver()
    saver.begin(lambda: done.append("written"))
    saver.finish()
    assert done == ["written", "released"]


def test_a_cards_failure_is_told_as_it_is_and_a_cut_that_cannot_be_written_by_its_stage():
    saver = Saver()

    def fail():
        raise CardFailed("rank 1 failed in stage 'save': no space")

    saver.begin(fail)
    with pytest.raises(CardFailed, match="rank 1 failed in stage 'save'"), saver.pause():
        raise AssertionError("the last one was not written")
    with pytest.raises(SaveFailed, match="the controller failed in stage 'save'"), Saver().pause():
        raise NotADirectoryError("checkpoints")
