"""The list of `bash scripts/test.sh quick`: it names what is there, and something of every room."""

from pathlib import Path

TESTS = Path(__file__).parent
CHOSEN = (TESTS / "quick.txt").read_text().splitlines()


def test_every_entry_of_the_quick_list_exists():
    for entry in CHOSEN:
        path, _, test = entry.partition("::")
        assert (TESTS.parent / path).is_file(), entry
        assert not test or f"def {test.partition('[')[0]}(" in (TESTS.parent / path).read_text(), entry


def test_every_room_has_a_quick_test_and_a_whole_run_is_among_them():
    rooms = {folder.name for folder in TESTS.iterdir() if folder.is_dir() and any(folder.rglob("test_*.py"))}
    assert rooms == {parts[1] for entry in CHOSEN if len(parts := entry.split("/")) > 2}
    assert any(entry.startswith("tests/stalesync/test_run.py::") for entry in CHOSEN)
