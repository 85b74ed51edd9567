import logging
from itertools import product

import pytest

from fusion.telemetry import RunFolder
from fusion.telemetry.files import read_jsonl
from fusion.telemetry.loggers import LoggerGroup


class Recorder:
    """Keeps what it receives; fails at a step, or at its start or end, if told so."""

    made: list["Recorder"] = []
    fails_at: int | None = None
    fails_to_start = fails_to_close = False

    def __init__(self, run):
        if self.fails_to_start:
            raise PermissionError("no key")
        self.run, self.rows, self.num_closed = run, [], 0
        self.made.append(self)

    def log(self, step, metrics):
        if step == self.fails_at:
            raise ConnectionError("no server" + " !" * 200 + "\nmore")
        self.rows.append((step, dict(metrics)))

    def close(self):
        self.num_closed += 1
        if self.fails_to_close:
            raise TimeoutError("too late")


def recorder(**attributes):
    return type("Own", (Recorder,), {"made": [], **attributes})


def test_every_logger_receives_every_step_under_one_id_over_all_starts(tmp_path):
    one, other = recorder(), recorder()
    with RunFolder(tmp_path, "run") as folder:
        folder.open_loggers({"one": one}, {"run": {"steps": 3}})
        folder.log(1, {"a/mean": 1.5})
    with RunFolder(tmp_path, "run", "resume") as folder:
        folder.open_loggers({"one": one, "other": other})
        folder.rewind(1)
        folder.log(2, {"a/mean": 2.5})
    first, second, added = *one.made, *other.made
    assert first.rows == [(1, {"a/mean": 1.5})] and second.rows == added.rows == [(2, {"a/mean": 2.5})]
    assert (first.run.name, first.run.folder, first.run.config) == ("run", folder.path, {"run": {"steps": 3}})
    assert first.run.id == second.run.id == added.run.id and len(first.run.id) == 16
    assert [one.run.resumed for one in (first, second, added)] == [False, True, False]
    assert [one.num_closed for one in (first, second, added)] == [1, 1, 1]


@pytest.mark.parametrize("content", [b"{}", b"[]", b"\xff", b'{"id": "x"}', None])
def test_a_damaged_file_of_ids_is_named_and_gives_a_new_id(tmp_path, content):
    one = recorder()
    with RunFolder(tmp_path, "run") as folder:
        folder.open_loggers({"one": one})
    path = folder.path / "loggers.json"
    text = path.read_bytes()
    path.write_bytes(text.replace(one.made[0].run.id.encode(), b"0" * 16) if content is None else content)
    with RunFolder(tmp_path, "run", "resume") as folder:
        folder.open_loggers({"one": one})
        assert folder.notes[0].startswith("loggers.json is damaged")
    with RunFolder(tmp_path, "run", "resume") as folder:
        folder.open_loggers({"one": one})
        assert not folder.notes
    first, second, third = (logger.run for logger in one.made)
    assert first.id != second.id == third.id and not second.resumed and third.resumed


def test_every_flipped_bit_of_the_file_of_ids_is_named(tmp_path):
    with RunFolder(tmp_path, "run") as folder:
        folder.open_loggers({"one": recorder()})
    path = folder.path / "loggers.json"
    whole = path.read_bytes()
    assert not LoggerGroup(folder.path, {}).notes
    for at, bit in product(range(len(whole)), range(8)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        assert LoggerGroup(folder.path, {}).notes, path.read_bytes()


def test_one_that_fails_is_stopped_and_reported_and_the_others_go_on(tmp_path, caplog):
    good, bad = recorder(), recorder(fails_at=2, fails_to_close=True)
    with RunFolder(tmp_path, "run") as folder, caplog.at_level(logging.WARNING):
        folder.open_loggers({"bad": bad, "good": good})
        for step in (1, 2, 3):
            folder.log(step, {"a": float(step)})
        assert folder.notes == [
            "run.loggers: bad was stopped at step 2: ConnectionError: no server" + (" !" * 200)[:291],
            "run.loggers: bad could not be closed: TimeoutError: too late",
        ]
    assert [step for step, _ in good.made[0].rows] == [1, 2, 3] and bad.made[0].num_closed == 1
    assert len(read_jsonl(folder.path / "metrics.jsonl")) == 3
    assert "metrics.jsonl has all metrics" in caplog.text and "no server" in caplog.text


def test_one_that_does_not_start_is_an_error_and_the_others_are_closed(tmp_path):
    good, bad = recorder(), recorder(fails_to_start=True)
    with pytest.raises(ValueError, match="run.loggers: bad could not be started: PermissionError: no key"):
        LoggerGroup(tmp_path, {"good": good, "bad": bad})
    assert good.made[0].num_closed == 1
    assert LoggerGroup(tmp_path, {}).notes == []


def test_an_interrupt_is_not_taken_for_a_failure(tmp_path):
    class Interrupted(Recorder):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    group = LoggerGroup(tmp_path, {"own": Interrupted})
    with pytest.raises(KeyboardInterrupt):
        group.log(1, {})
