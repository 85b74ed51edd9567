"""Where tests run: each process of a parallel run begins with what starts the same processes."""

from hypothesis import given
from hypothesis import strategies as st

from tests import test_machine
from tests.arrangement import KINDS, _started_by, arranged
from tests.stalesync import test_run
from tests.training import test_layouts


@given(st.lists(st.sampled_from([*KINDS, "", ""]), max_size=60), st.integers(2, 5))
def test_every_test_is_in_one_place_and_those_of_a_kind_keep_their_order(kinds, processes):
    found = arranged(range(len(kinds)), kinds, processes)
    assert sorted(found) == [*range(len(kinds))]
    for kind in KINDS:
        assert [item for item in found if kinds[item] == kind] == sorted(item for item in found if kinds[item] == kind)


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 20), st.integers(2, 5))
def test_every_process_begins_with_its_kind(num_shared, num_runs, num_ranks, processes):
    """If there are enough tests of no kind, as in the default run."""
    kinds = [*["runs"] * num_runs, *["ranks"] * num_ranks, *[""] * 200, *["ray"] * num_shared]
    found, total = arranged(range(len(kinds)), kinds, processes), len(kinds)
    parts = [found[total * n // processes : total * (n + 1) // processes] for n in range(processes)]
    for number, part in enumerate(parts):
        of_part = [kinds[item] for item in part]
        count = of_part.count("ranks")
        begin = ["ranks"] * count if number else ["ray"] * num_shared + ["runs"] * num_runs
        assert of_part == begin + [""] * (len(part) - len(begin))
        assert not number or abs(count - num_ranks / (processes - 1)) < 1


def test_a_kind_is_what_a_module_starts_itself_or_by_others():
    assert "launcher" in _started_by(test_run), "by tests/stalesync/runs.py"
    assert "run_ranks" in _started_by(test_layouts) and "launcher" not in _started_by(test_layouts)
    assert not {"launcher", "use_ray", "run_ranks"} & _started_by(test_machine)
