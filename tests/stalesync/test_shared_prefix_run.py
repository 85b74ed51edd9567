"""Whole runs whose cards share each sample (context parallelism), and whose samples, conversations in branches, share
the rows of their prefixes: killed and resumed, bitwise again."""

import pytest

from tests.stalesync.conversations import make_chatting_model
from tests.stalesync.runs import rows_of
from tests.stalesync.stopped_run import BOUNDARIES, BRANCHES, TRAINING
from tests.stalesync.test_conversations_run import AGAIN, assert_kills_change_nothing, completed

SHARED = ["cluster.npus=2", "parallel=single", "parallel.train.cp=2", "training.share_prefixes=on"]
SHARED += ["algorithm.minibatches=2", "run.eval_prompts=0", "run.steps=2"]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking")
    make_chatting_model(folder, thinks=True)
    return folder


@pytest.fixture(scope="module")
def whole(thinking, tmp_path_factory):
    """A synchronous run that nothing disturbs."""
    return completed(tmp_path_factory.mktemp("whole"), "Env", thinking, *AGAIN, *SHARED)


def assert_shares_rows(run):
    rows = rows_of(run)
    assert all(0.1 < row["training/shared_rows_share"] < 0.9 for row in rows), "trees of prompts and branches"
    assert rows[-1]["env/num_branches/max"] > 1 and rows[-1]["actor/grad_norm"] > 0


@pytest.mark.extended
def test_a_run_that_is_killed_while_it_trains_trees_on_shared_samples_is_bitwise_one_that_is_not(
    thinking, whole, tmp_path
):
    assert_kills_change_nothing(thinking, whole, tmp_path, ["training"], *SHARED)
    assert_shares_rows(whole)
    assert_shares_rows(tmp_path / "run")


@pytest.mark.extended
@pytest.mark.parametrize("boundaries", [BOUNDARIES, BRANCHES, TRAINING], ids=["turns", "branches", "updates"])
def test_a_run_that_is_killed_at_each_boundary_is_bitwise_one_that_is_not(thinking, whole, tmp_path, boundaries):
    assert_kills_change_nothing(thinking, whole, tmp_path, boundaries, *SHARED)
