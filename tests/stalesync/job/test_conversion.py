"""What an export of a checkpoint refuses before it reads weights."""

import pytest

from stalesync.job import savepoint
from stalesync.job.conversion import convert


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    for name in (savepoint.MARK, savepoint.NAME):
        (checkpoint / name).write_text("{}")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"--tokenizer {folder}: expected a folder with a tokenizer"):
            convert(checkpoint, tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out").exists()
