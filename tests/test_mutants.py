"""The list of recorded faults (`mutants.py`): every line that one changes is in its file once, and its tests exist."""

from tests.mutants import ROOT, mutants


def test_every_fault_changes_one_line_that_is_there():
    for mutant in mutants():
        assert (ROOT / mutant.path).read_text().count(mutant.line) == 1, mutant
        assert mutant.line != mutant.fault and all((ROOT / test).exists() for test in mutant.tests), mutant


def test_faults_are_spread_over_the_rooms():
    rooms = {"/".join(mutant.path.split("/")[:2]) for mutant in mutants()}
    assert len(mutants()) >= 50 and len(rooms) >= 15
