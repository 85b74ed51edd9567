"""Files of a run belong to its user alone, and nothing is written through a link that somebody has put there."""

import json
import os
import stat

import pytest

from fusion.telemetry import RunFolder, Span
from fusion.telemetry.files import TAIL_BYTES, JsonLines, open_new, read_jsonl, write_atomic


def test_only_the_user_enters_a_new_run_folder_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folders = [RunFolder(tmp_path, "run") for _ in range(2)]
    finally:
        os.umask(before)
    assert [stat.S_IMODE(folder.path.stat().st_mode) for folder in folders] == [0o700, 0o700]
    for folder in folders:
        folder.close()
    folders[0].path.chmod(0o750)
    RunFolder(tmp_path, "run", "resume").close()
    assert stat.S_IMODE(folders[0].path.stat().st_mode) == 0o750, "a user who has opened it to others has meant it"


def test_a_file_that_is_replaced_is_not_written_through_a_link(tmp_path):
    precious, file = tmp_path / "precious", tmp_path / "file"
    precious.write_text("mine")
    file.symlink_to(precious)
    write_atomic(file, "ours")
    assert precious.read_text() == "mine" and file.read_text() == "ours" and not file.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "precious"]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    monkeypatch.setattr("fusion.telemetry.files.secrets.token_hex", lambda count: "guessed")
    (tmp_path / ".file.guessed").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "file", "ours")
    assert precious.read_text() == "mine" and not (tmp_path / "file").exists()


def test_what_cannot_be_written_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")

    def full(fd, data, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fusion.telemetry.files.write_all", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def test_objects_that_differ_in_one_field_are_written_as_if_each_were_encoded(tmp_path):
    values = ["g0", 'a "quoted" name', "ü\n"]
    one_by_one, together = JsonLines(tmp_path / "one"), JsonLines(tmp_path / "together")
    for value in values:
        one_by_one.write({"step": 3, "group": value, "ended": "trained", "lag": 0})
    together.write_each({"step": 3}, "group", values, {"ended": "trained", "lag": 0})
    together.write_each({"step": 3}, "group", [], {"lag": 0})
    own = {"prompt_tokens": [3, 0, 12], "response_tokens": [[5, 600], [], [7]]}
    for value, prompt, responses in zip(values, *own.values(), strict=True):
        tokens = {"prompt_tokens": prompt, "response_tokens": responses}
        one_by_one.write({"step": 3, "group": value, "ended": "trained", **tokens})
    together.write_each({"step": 3}, "group", values, {"ended": "trained"}, own)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "together").read_bytes()


def test_lines_are_not_appended_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with RunFolder(tmp_path, "run") as run:
        for name in ("metrics.jsonl", "samples.jsonl", "groups.jsonl"):
            (run.path / name).symlink_to(precious)
        with pytest.raises(OSError, match="symbolic links"):
            run.log(1, {"a": 1.0})
        with pytest.raises(OSError, match="symbolic links"):
            run.log_samples(1, [{"prompt": "p", "response": "r", "reward": 1.0}])
        with pytest.raises(OSError, match="symbolic links"):
            run.log_groups(1, ["e0-1"], "trained")
        run.log_spans([Span("card 0", "train", "train", 0, 5)])
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("size", [0, 10, TAIL_BYTES, 3 * TAIL_BYTES + 1])
def test_a_torn_line_of_any_length_is_cut(tmp_path, size):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n' + "x" * size)
    file = JsonLines(path)
    file.write({"a": 2})
    file.close()
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2]
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]


def test_a_new_file_takes_no_name_that_is_taken(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("link", "link"):
        with pytest.raises(FileExistsError):
            open_new(tmp_path / name)
