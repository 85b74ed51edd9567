"""What a failed run leaves in its folder: rank and stage first, every rank's log, and the same for programs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from fusion.npu.failures import FailureKind, RankFailure
from stalesync.process import run_log
from stalesync.process.failures import CardFailed, FailedStage, QueueFailed, RayNotStarted, late_rank
from stalesync.process.process_log import keeping_warnings, logging_to, stderr_to
from stalesync.process.run_log import Progress, RunLog, describe_failure
from stalesync.process.stopping import Stopped

FAILURE = RankFailure(1, "train", FailureKind.OUT_OF_MEMORY, "OutOfMemory", "8 GiB\nHBM by owner: all of it")
TRACE = 'Traceback (most recent call last):\n  File "worker.py", line 3, in train'


def failed_card():
    return FailedStage(FAILURE, TRACE).error()


def record(tmp_path, error, **progress):
    """Lets a run end by an error."""
    logs, report = RunLog(tmp_path), {}
    logs.of_rank(0).write_text("rank 0 waits\n")
    logs.of_rank(1).write_text("rank 1 allocates\n")
    logs.controller.write_text("step 3\n")
    with pytest.raises(type(error)), logs.recording(Progress(**progress), report, world=3):
        with logs.recording(Progress(**progress), report, world=3):  # as in a run: once more around its loop
            raise error
    assert report == {"outcome": "failed"}


def test_the_log_begins_with_rank_and_stage_and_ends_with_every_ranks_log(tmp_path):
    record(tmp_path, error := failed_card(), stage="train", hosts=["here", "there"], current_step=lambda: 12)
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0] == "rank 1, stage 'train', step 12, host there: OutOfMemory: 8 GiB"
    parts = ["Traceback (most recent call last):", "rank 1 allocates", "rank 0 waits", "step 3"]
    assert sorted(parts, key=lines.index) == parts
    assert any("no log" in line for line in lines), "rank 2 has written none"
    failure = json.loads((tmp_path / "error.json").read_text())
    assert {name: failure[name] for name in ("error", "rank", "host", "stage", "step", "kind", "traceback")} == {
        "error": "OutOfMemory",
        "rank": 1,
        "host": "there",
        "stage": "train",
        "step": 12,
        "kind": "out_of_memory",
        "traceback": TRACE,
    }
    assert failure["message"] == FAILURE.message
    assert error.__notes__ == [f"every rank's log and the traceback: {tmp_path / 'run.log'}"]


@pytest.mark.parametrize("error", [ValueError("no such thing"), RayNotStarted(None, TimeoutError("60 s")), OSError(28)])
def test_what_the_controller_raises_names_its_stage(tmp_path, error):
    record(tmp_path, error, stage="start Ray")
    failure = json.loads((tmp_path / "error.json").read_text())
    assert (failure["error"], failure["rank"], failure["step"]) == (type(error).__name__, None, None)
    assert failure["stage"] == "start Ray" and failure["message"] == str(error)
    assert "in record\n" in failure["traceback"] or ", in record" in failure["traceback"]
    assert (tmp_path / "run.log").read_text().startswith("controller, stage 'start Ray', host ")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            FailedStage(RankFailure(0, "generate", FailureKind.DIED, "ActorDiedError", "a page of Ray")).error(),
            "rank 0 died",
        ),
        (CardFailed("rank 2 hangs", failure=late_rank(2, "pause", "rank 2 hangs")), "rank 2 hangs"),
        (QueueFailed("the core died"), "the queue has failed: the core died"),
    ],
)
def test_what_a_card_cannot_report_itself_is_told_by_the_controller(error, expected):
    failure = describe_failure(error, Progress("train", ["a", "b"], lambda: 1))
    assert failure["message"].startswith(expected) and expected in failure["traceback"]
    if error.failure is not None and error.failure.rank == 2:
        assert (failure["host"], failure["kind"], failure["stage"]) == (None, "timed_out", "pause")


def test_a_run_that_ends_well_or_is_stopped_has_no_error(tmp_path):
    logs, report = RunLog(tmp_path), {}
    with logs.recording(Progress(), report, world=1):
        pass
    assert report == {"outcome": "finished"}
    with pytest.raises(Stopped), logs.recording(Progress(), report, world=1):
        raise Stopped(15)
    assert report == {"outcome": "stopped by SIGTERM"}
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}


def test_a_resumed_run_keeps_earlier_records_apart(tmp_path):
    for _ in range(3):
        record(tmp_path, failed_card())
    RunLog(tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {"logs"}
    assert names == {f"{stem}.start-{number}.{kind}" for stem, kind in (("error", "json"), ("run", "log"))
                     for number in (1, 2, 3)}  # fmt: skip
    for kept in ("error.start-1.json", "error.start-2.json", "run.start-1.log"):  # as a user may remove some
        (tmp_path / kept).unlink()
    record(tmp_path, failed_card())
    RunLog(tmp_path)
    assert (tmp_path / "error.start-4.json").exists() and (tmp_path / "run.start-4.log").exists()
    assert (tmp_path / "error.start-3.json").exists(), "none is overwritten"


def test_a_text_that_utf_8_cannot_encode_does_not_hide_the_error(tmp_path):
    record(tmp_path, ValueError("row \ud83d of the data"))
    assert "ValueError: row \\ud83d of the data" in (tmp_path / "run.log").read_text()
    assert "\ud83d" in json.loads((tmp_path / "error.json").read_text())["message"]


def test_a_long_log_is_kept_in_its_file_and_only_its_end_is_repeated(tmp_path):
    (tmp_path / "long.log").write_text("".join(f"line {number}\n" for number in range(100)))
    text = run_log.end_of(tmp_path / "long.log", 100)
    assert text.splitlines()[1].startswith("line ") and text.endswith("line 99") and len(text) < 160
    assert run_log.end_of(tmp_path / "none.log", 100).startswith("(no log: ")


def test_a_full_disk_does_not_hide_the_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_log, "write_atomic", full)
    error = failed_card()
    with pytest.raises(CardFailed), RunLog(tmp_path).recording(Progress(), {}, world=1):
        raise error
    assert error.__notes__ == ["run.log could not be written: [Errno 28] No space left on device"]


WORKER = """
import logging, os, sys, warnings
from stalesync.process.process_log import write_log_to
print("before", flush=True)
write_log_to(sys.argv[1])
print("printed")
logging.getLogger("fusion").info("logged")
warnings.warn("warned")
os.write(2, b"written by C++\\n")
if sys.argv[2] == "crash":
    import ctypes
    ctypes.string_at(0)
raise RuntimeError("the last word")
"""


@pytest.mark.parametrize("end", ["raise", "crash"])
def test_a_worker_writes_all_it_says_to_its_log_also_when_it_crashes(tmp_path, end):
    path = tmp_path / "rank-0.log"
    done = subprocess.run([sys.executable, "-c", WORKER, str(path), end], capture_output=True, text=True)
    assert done.stdout == "before\n" and done.stderr == ""
    text = path.read_text()
    for words in ("process ", "printed", "INFO fusion: logged", "warned", "written by C++"):
        assert words in text, text
    assert ("the last word" if end == "raise" else "Segmentation fault") in text
    assert path.stat().st_mode & 0o077 == 0


def test_a_worker_on_a_host_without_the_folder_goes_on(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path / "none" / "rank-0.log"), "raise"], capture_output=True, text=True
    )
    assert "no log in the run's folder" in done.stderr and "the last word" in done.stderr


def test_what_c_writes_to_the_standard_error_while_ray_starts_goes_to_its_log(tmp_path, capfd):
    with pytest.raises(ZeroDivisionError), stderr_to(tmp_path / "ray.log"):
        os.write(2, b"*** StackTrace Information ***\n")
        raise ZeroDivisionError
    os.write(2, b"shown\n")
    assert capfd.readouterr().err == "shown\n"
    assert (tmp_path / "ray.log").read_text() == "*** StackTrace Information ***\n"
    with stderr_to(None):
        os.write(2, b"shown, too\n")
    assert capfd.readouterr().err == "shown, too\n"


def test_warnings_from_before_the_log_are_printed_once_and_in_log_and_notes(tmp_path, capsys, monkeypatch):
    root, early = logging.getLogger(), []
    monkeypatch.setattr(root, "handlers", [])
    with keeping_warnings(early):
        logging.getLogger("stalesync.launch").warning("reward.path: %s", "a sample failed\nits trace")
        logging.getLogger("stalesync.launch").info("a detail")
    with logging_to(tmp_path / "controller.log", early) as notes:
        logging.getLogger("stalesync.cards.cards").warning("later")
    assert root.handlers == [] and notes == ["reward.path: a sample failed"]
    assert capsys.readouterr().err == "reward.path: a sample failed\nits trace\nlater\n"
    first, trace, later = (tmp_path / "controller.log").read_text().splitlines()
    assert first.endswith("WARNING stalesync.launch: reward.path: a sample failed") and trace == "its trace"
    assert later.endswith("later")


def test_warnings_of_the_controller_are_in_its_log_and_still_printed(tmp_path, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with logging_to(tmp_path / "controller.log"):
        logging.getLogger("stalesync.cards.cards").warning("stage train: waiting")
        logging.getLogger("stalesync.cards.cards").info("a detail")
    assert root.handlers == []
    assert capsys.readouterr().err == "stage train: waiting\n"
    text = (tmp_path / "controller.log").read_text()
    assert "WARNING stalesync.cards.cards: stage train: waiting" in text and "a detail" in text
