"""A full disk stops logs with a warning, and every error of a write names the file and the bytes."""

import errno
import json
import logging
import resource
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusion.npu.profile import Profile
from fusion.telemetry import RunFolder
from fusion.telemetry import files as telemetry_files
from fusion.telemetry.files import JsonLines, read_jsonl, write_all, write_atomic
from fusion.telemetry.manifest import FileWriter
from fusion.telemetry.timeline import Span
from fusion.telemetry.trace import TimelineFile, read_timeline
from stalesync.command_line import run_job


@contextmanager
def full(nbytes=0):
    """No file of this process may grow beyond so many bytes: what cannot be written is EFBIG, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def spans(*starts):
    return [Span(f"card {start}", "train", "train", start, start + 5) for start in starts]


@pytest.mark.parametrize("write", ["descriptor", "atomic", "lines", "timeline", "checkpoint"])
def test_an_error_names_the_file_and_the_bytes(tmp_path, write):
    path = tmp_path / "file"
    if write == "timeline":
        timeline = TimelineFile(path)
    with full(), pytest.raises(OSError) as raised:
        if write == "descriptor":
            with path.open("wb") as file:
                write_all(file.fileno(), b"x" * 1234)
        elif write == "atomic":
            write_atomic(path, "x" * 1234)
        elif write == "lines":
            JsonLines(path).write({"a": "x" * (1234 - len('{"a": ""}\n'))})
        elif write == "timeline":
            timeline.append(spans(1))
        else:
            FileWriter(path, total=1234).write(b"x" * 10)
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(path)
    assert "bytes to write, " in str(raised.value) and " bytes are free): " in str(raised.value)
    assert write == "timeline" or "(1,234 bytes to write, " in str(raised.value)
    assert [one.name for one in tmp_path.iterdir()] == ([] if write == "atomic" else ["file"])


def test_lines_that_find_no_space_are_written_when_there_is_some(tmp_path):
    reports = []
    file = JsonLines(tmp_path / "lines", reports.append)
    file.write({"step": 1})
    size = file.path.stat().st_size
    with full(size + 3):  # a part of the line has space
        file.write({"step": 2})
        file.write({"step": 3}, {"step": 4})
        assert [row["step"] for row in read_jsonl(file.path)] == [1] and file.path.stat().st_size == size
    file.write({"step": 5})
    assert [row["step"] for row in read_jsonl(file.path)] == [1, 2, 3, 4, 5] and len(reports) == 1
    with full():
        file.write({"step": 6})
    file.close()
    assert [row["step"] for row in read_jsonl(file.path)] == [1, 2, 3, 4, 5, 6] and len(reports) == 2


def test_a_log_keeps_a_bounded_number_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry_files, "MAX_PENDING_BYTES", 40)
    file = JsonLines(tmp_path / "lines", lambda error: None)
    with full():
        for step in range(1, 5):  # 12 bytes each; the fourth does not fit beside the others
            file.write({"step": step})
    file.write({"step": 5})
    assert [row["step"] for row in read_jsonl(file.path)] == [5]


def test_a_timeline_is_as_it_was_after_a_write_that_found_no_space(tmp_path):
    timeline = TimelineFile(tmp_path / "timeline.json", origin_ns=0)
    timeline.append(spans(1))
    with full(timeline.path.stat().st_size + 10), pytest.raises(OSError):
        timeline.append(spans(2))
    assert json.loads(timeline.path.read_text()) and read_timeline(timeline.path) == spans(1)
    timeline.append(spans(2, 3))
    assert read_timeline(timeline.path) == spans(1, 2, 3), "what names card 2 is written with its first span"
    before = timeline.path.read_bytes()
    with full(), pytest.raises(OSError):
        TimelineFile(timeline.path)
    assert timeline.path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["timeline.json"]


def test_a_run_goes_on_with_one_warning_for_each_file_and_can_be_rewound(tmp_path, caplog):
    with RunFolder(tmp_path, "run") as run:
        for step in range(1, 9):
            with full(run.path.joinpath("metrics.jsonl").stat().st_size + 5 if 3 <= step <= 5 else 1 << 30):
                run.log(step, {"a": step})
                run.log_samples(step, [{"prompt": "p" * 300, "response": "r", "reward": 1.0}])
                run.log_groups(step, [f"e0-{step}" + "x" * 300], "trained", lag=0)
                run.log_evaluation(step, [{"step": step, "file": "f" * 300}], {})
                run.log_spans(spans(step))
                run.write_best({"step": step, "why": "w" * 300})
        names = ["best.json", "evaluations.jsonl", "groups.jsonl", "metrics.jsonl", "samples.jsonl", "timeline.json"]
        warned = [one for one in caplog.records if one.levelno == logging.WARNING]
        logger = [one.getMessage() for one in warned if "run.loggers" in one.getMessage()]
        assert len(logger) == 1 and "tensorboard was stopped at step 3" in logger[0] and "events.out" in logger[0]
        others = sorted(Path(one.getMessage().split("'")[1]).name for one in warned if one.getMessage() not in logger)
        assert others == names and len(run.notes) == len(names) + 1
        assert all(f"{run.path}/" in note for note in run.notes)
        for name in ("metrics.jsonl", "samples.jsonl", "groups.jsonl", "evaluations.jsonl"):
            assert [row["step"] for row in read_jsonl(run.path / name)] == [*range(1, 9)], name
        cards = {span.card for span in read_timeline(run.path / "timeline.json")}
        assert cards == {f"card {step}" for step in (1, 2, 6, 7, 8)}
    with (run.path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 9, "a": 9.')
    with RunFolder(tmp_path, "run", "resume") as resumed:
        assert resumed.rewind(4) == 4
        resumed.log(5, {"a": 5.5})
        assert [(row["step"], row["a"]) for row in read_jsonl(resumed.path / "metrics.jsonl")][3:] == [(4, 4), (5, 5.5)]


def test_a_profile_that_is_cut_off_is_removed_with_a_warning(tmp_path, caplog):
    for name in ("whole", "cut"):
        profile = Profile("cpu", tmp_path / name)
        torch.ones(9) + 1
        with full(1 << 30 if name == "whole" else 10):
            profile.close()
    assert [path.name for path in tmp_path.iterdir()] == ["whole.json"]
    assert json.loads((tmp_path / "whole.json").read_text())
    (warning,) = caplog.messages
    assert "/cut.json could not be written, or not whole" in warning


def test_a_run_whose_folder_cannot_be_written_ends_with_one_line(monkeypatch, capsys):
    def launch(config, **options):
        raise OSError(
            errno.ENOSPC, "No space left on device (9 bytes to write, 0 bytes are free)", "runs/r/config.yaml"
        )

    monkeypatch.setattr("stalesync.launch.launch", launch)
    with pytest.raises(SystemExit) as ended:
        run_job(SimpleNamespace(cluster=SimpleNamespace(address="auto")))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith("error: [Errno 28] No space left on device (9 bytes to write, ")
    assert "'runs/r/config.yaml'" in line and "run.dir" in line
