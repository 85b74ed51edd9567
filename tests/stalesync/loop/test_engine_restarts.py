"""An engine whose process is killed is replaced, and the run continues: whole runs, real Ray, real workers, emulated
cards. The reward function kills, so that it comes in the middle of a step's generation."""

import json
import os
import re
import signal
import time

import pytest
import torch

from tests.machine import patience, wait_for
from tests.stalesync.runs import begin, rows_of, train, wait_until, weights_of

STEPS = 3
OPTIONS = [
    "cluster.npus=3",
    "parallel=single",
    "fusion=separate",
    "fusion.infer_cards=2",
    "rollout=batch_invariant",
    "rollout.max_response_length=40",
    "rollout.sampling.forced_median=12",
    "rollout.engine.max_seqs=4",
    "run.eval_prompts=0",
    "training.lr=1e-3",
    f"run.steps={STEPS}",
]

JUDGE = """
import os, re, signal, time, zlib
from pathlib import Path

def score(prompt, response, answer, **fields):
    logs, kills = Path({logs!r}), {kills!r}
    if not logs.is_dir():  # the call before the run has a folder
        return 0.0
    with open({calls!r}, "a") as calls:
        calls.write("x")
        number = calls.tell()
    for rank in kills.get(number, ()):
        pid = re.findall(r"process (\\d+) on", (logs / f"rank-{{rank}}.log").read_text())[-1]
        os.kill(int(pid), signal.SIGKILL)
    if number in kills:
        time.sleep({pause_s})
    return float(zlib.crc32((prompt + response).encode()) % 3)
"""
"""Kills cards at its n-th call: ``kills`` n → ranks. No step ends before the deaths are noticed."""

SPENT = "timing_s/", "perf/", "save/", "memory/", "distqueue/", "rollout/", "switch/"


def judge(folder, kills):
    folder.mkdir()
    path = folder / "judge.py"
    logs, calls = str(folder / "run" / "logs"), str(folder / "calls")
    path.write_text(JUDGE.format(logs=logs, kills=kills, calls=calls, pause_s=patience(0.4)))
    return [f"reward.path={path}:score", "reward.workers=1", f"reward.time_limit_s={patience(20)}"]


def run(base, folder, *overrides, kills):
    done = train(base, folder, *OPTIONS, *judge(folder, kills), *overrides)
    return done, folder / "run"


def samples_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def figures_of(folder):
    return [{name: value for name, value in row.items() if not name.startswith(SPENT)} for row in rows_of(folder)]


def restarts_of(folder):
    return sum(row.get("rollout/engine_restarts", 0) for row in rows_of(folder))


def assert_bitwise(ours, theirs):
    assert samples_of(ours) == samples_of(theirs), "the same tokens"
    assert figures_of(ours) == figures_of(theirs) and len(figures_of(ours)) == STEPS
    one, other = weights_of(ours / "hf"), weights_of(theirs / "hf")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """Returns the folder of an undisturbed run."""
    folders = {}

    def of(*overrides):
        if overrides not in folders:
            done, folders[overrides] = run(base, tmp_path_factory.mktemp("undisturbed") / "it", *overrides, kills={})
            assert done.returncode == 0, done.stdout + done.stderr
            assert not restarts_of(folders[overrides])
        return folders[overrides]

    return of


TP2 = ["parallel.infer.tp=2"]
EP2 = ["parallel.infer.ep=2", "cluster.npus=5", "fusion.infer_cards=4"]
HYBRID = ["fusion=hybrid", "fusion.infer_cards=2"]
CHUNKS = ["rollout.schedule.chunk_tokens=8"]
FILTERS = ["algorithm=dapo", "rollout.max_response_length=40"]
ONE = ["cluster.npus=2", "fusion.infer_cards=1"]


@pytest.mark.parametrize(
    ("overrides", "kills"),
    [
        pytest.param([], {40: [2]}, id="one of two"),
        pytest.param([], {40: [1, 2]}, id="all", marks=pytest.mark.extended),
        pytest.param([], {32: [1], 70: [2]}, id="one after the other", marks=pytest.mark.extended),
        pytest.param(ONE, {40: [1]}, id="the only one", marks=pytest.mark.extended),
        pytest.param(EP2, {40: [4]}, id="ep2", marks=pytest.mark.extended),
        pytest.param(HYBRID, {40: [2]}, id="hybrid", marks=pytest.mark.extended),
        pytest.param(CHUNKS, {40: [2], 70: [1]}, id="chunks", marks=pytest.mark.extended),
        pytest.param([*CHUNKS, *HYBRID], {40: [2], 70: [1]}, id="chunks, hybrid", marks=pytest.mark.extended),
    ],
)
def test_an_engine_killed_in_mid_step_is_replaced_and_the_steps_tokens_are_those_of_an_undisturbed_run(
    base, undisturbed, tmp_path, overrides, kills
):
    done, folder = run(base, tmp_path / "killed", *overrides, kills=kills)
    assert done.returncode == 0, done.stdout + done.stderr
    count = sum(map(len, kills.values()))
    assert restarts_of(folder) == count and f"{count} engines died and were replaced" in done.stdout
    assert_bitwise(folder, undisturbed())
    for ranks in kills.values():
        died = rf"rank {ranks[0]} died in stage '(generate|idle)' \([^)]*\); "
        requests = r"(\d+ requests moved to other engines \(\d+ tokens kept\)|it had no unfinished requests)"
        assert re.search(rf"{died}{requests}, and engine \d is started again", done.stdout)


@pytest.mark.extended
@pytest.mark.parametrize("overrides", [TP2, FILTERS], ids=["tp2", "filters"])
def test_so_it_is_in_other_layouts_and_where_groups_are_filtered(base, undisturbed, tmp_path, overrides):
    done, folder = run(base, tmp_path / "killed", *overrides, kills={40: [2]})
    assert done.returncode == 0, done.stdout + done.stderr
    assert restarts_of(folder) == 1
    assert_bitwise(folder, undisturbed(*overrides))


AHEAD = ["stalesync.max_staleness=1", "run.steps=8", "rollout=sampling", "rollout.sampling.forced_median=20"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="separate"),
        pytest.param(CHUNKS, id="chunks"),
        pytest.param(HYBRID, id="hybrid"),
        pytest.param([*CHUNKS, *HYBRID, "rollout.kv_pool.suspended=pool"], id="pool"),
        pytest.param([*CHUNKS, "rollout.kv_pool.suspended=keep"], id="keep"),
        pytest.param([*CHUNKS, "rollout.drafts.source=both", "rollout.drafts.history=2"], id="drafts"),
    ],
)
def test_with_generation_ahead_of_training_no_group_is_lost_or_trained_twice(base, tmp_path, overrides):
    done, folder = run(base, tmp_path / "killed", *AHEAD, *overrides, kills={70: [2], 150: [1]})
    print(done.stdout[:4000])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(folder)
    assert restarts_of(folder) == 2 and max(row["staleness/max"] for row in rows) <= 1
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert all(row["ended"] == "trained" for row in groups)
    assert len({row["group"] for row in groups}) == len(groups) == 8 * 8
    last = rows[-1]
    assert last["distqueue/ended/done"] == 32 * 8 and not last.get("distqueue/ended/lost:earlier tokens")


@pytest.mark.parametrize(
    ("overrides", "kills", "says"),
    [
        pytest.param(
            ["run.max_engine_restarts=1"],
            {40: [2], 80: [1]},
            "; run.max_engine_restarts=1 engines have been",
            id="too many",
            marks=pytest.mark.extended,
        ),
        pytest.param(["run.max_engine_restarts=0"], {40: [2]}, "crashed)\n", id="none"),
        pytest.param([], {40: [0]}, "crashed)\n", id="the trainer", marks=pytest.mark.extended),
    ],
)
def test_a_death_that_is_not_mended_ends_the_run_and_says_why(base, tmp_path, overrides, kills, says):
    done, folder = run(base, tmp_path / "killed", *overrides, kills=kills)
    assert done.returncode == 1, done.stdout
    (rank,) = list(kills.values())[-1]
    assert f"error: rank {rank} died in stage '" in done.stderr and says in done.stderr
    failure = json.loads((folder / "error.json").read_text())
    assert failure["kind"] == "died" and failure["rank"] == rank


EVALUATED = ["run.eval_prompts=384", "rollout.max_response_length=12", "rollout.sampling.forced_median=4"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("number", "overrides"),
    [
        pytest.param(1, [], id="before the first step"),
        pytest.param(2, [], id="after the last step"),
        pytest.param(1, ONE, id="the only one"),
    ],
)
def test_an_engine_killed_in_an_evaluation_is_replaced_and_the_answers_are_those_of_an_undisturbed_run(
    base, undisturbed, tmp_path, number, overrides
):
    """``number``: of the evaluation."""
    rank = 1 if overrides is ONE else 2
    log = tmp_path / "killed" / "run" / "logs" / f"rank-{rank}.log"
    done = begin(base, tmp_path / "killed", *OPTIONS, *judge(tmp_path / "killed", {}), *EVALUATED, *overrides)
    wait_until(done, 180, lambda: log.exists() and log.read_text().count("stage answer") == number)
    pid = int(re.findall(r"process (\d+) on", log.read_text())[-1])
    os.kill(pid, signal.SIGKILL)
    out, err = done.communicate(timeout=patience(180))
    assert done.returncode == 0, out + err
    folder = tmp_path / "killed" / "run"
    assert f"rank {rank} died in stage 'answer'" in out and "1 engines died and were replaced" in out
    assert restarts_of(folder) == 1 and rows_of(folder)[-1]["distqueue/rows"] == 0
    assert_bitwise(folder, undisturbed(*EVALUATED))


def kill_in(stage, rank, logs, running):
    """Freezes a card when the first card begins to train, and kills it when the trainer begins a stage after that in
    which others wait for it: `switch` sends weights, `snapshot` is behind a cut."""

    def begun(stage):
        assert running.poll() is None, running.communicate()
        return first.read_text().count(f"stage {stage}") if first.exists() else 0

    first = logs / "rank-0.log"
    wait_for(lambda: begun("train"), 180, every_s=0.005)
    pid = int(re.findall(r"process (\d+) on", (logs / f"rank-{rank}.log").read_text())[-1])
    os.kill(pid, signal.SIGSTOP)
    before = begun(stage)
    wait_for(lambda: begun(stage) > before, 180, every_s=0.005)
    time.sleep(patience(0.5))  # until the other cards wait for it
    os.kill(pid, signal.SIGKILL)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "rank"), [([], 2), (ONE, 1), (CHUNKS, 2)], ids=["one of two", "the only one", "chunks"]
)
def test_an_engine_killed_while_weights_are_sent_is_replaced_and_they_are_sent_again(
    base, undisturbed, tmp_path, overrides, rank
):
    running = begin(base, tmp_path / "killed", *OPTIONS, *judge(tmp_path / "killed", {}), *overrides)
    folder = tmp_path / "killed" / "run"
    kill_in("switch", rank, folder / "logs", running)
    out, err = running.communicate(timeout=patience(180))
    assert running.returncode == 0, out + err
    assert f"rank {rank} died in stage 'switch'" in out and restarts_of(folder) == 1
    assert_bitwise(folder, undisturbed())


@pytest.mark.extended
def test_an_engine_killed_while_a_checkpoint_copies_its_drafts_is_replaced_and_the_checkpoint_has_the_others(
    base, undisturbed, tmp_path
):
    saves = ["rollout.drafts.source=history", "run.save_every=1"]
    running = begin(base, tmp_path / "killed", *OPTIONS, *judge(tmp_path / "killed", {}), *saves)
    folder = tmp_path / "killed" / "run"
    kill_in("snapshot", 2, folder / "logs", running)
    out, err = running.communicate(timeout=patience(180))
    assert running.returncode == 0, out + err
    assert "rank 2 died in stage 'snapshot_drafts'" in out and restarts_of(folder) == 1
    written = {path.name for path in (folder / "checkpoints").glob("*/drafts/rank-*.bin")}
    assert "rank-00001.bin" in written
    assert_bitwise(folder, undisturbed())


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param([2], [], id="one of two"),
        pytest.param([1], CHUNKS, id="chunks"),
        pytest.param([2, 1], [], id="both"),
    ],
)
def test_so_it_is_where_engines_receive_them_while_they_generate(base, tmp_path, ranks, overrides):
    options = [*OPTIONS, *AHEAD, "rollout.sampling.forced_median=60", "rollout.max_response_length=200", *overrides]
    running = begin(base, tmp_path / "killed", *options, *judge(tmp_path / "killed", {}))
    folder = tmp_path / "killed" / "run"
    for rank in ranks:
        log = folder / "logs" / f"rank-{rank}.log"

        def receives(log=log):
            assert running.poll() is None, running.communicate()
            return log.exists() and "stage receive" in log.read_text()

        wait_for(receives, 180, every_s=0.002)
        os.kill(int(re.findall(r"process (\d+) on", log.read_text())[-1]), signal.SIGKILL)
    out, err = running.communicate(timeout=patience(180))
    assert running.returncode == 0, out + err
    rows = rows_of(folder)
    assert re.search(f"rank {ranks[0]} died in stage '(receive|switch|generate)'", out)
    assert restarts_of(folder) == len(ranks) and max(row["staleness/max"] for row in rows) <= 1
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert all(row["ended"] == "trained" for row in groups)
    assert len({row["group"] for row in groups}) == len(groups) == 8 * 8
    assert rows[-1]["distqueue/ended/done"] == 32 * 8


@pytest.mark.extended
def test_where_cards_train_and_generate_a_death_while_weights_are_sent_ends_the_run_and_says_why(base, tmp_path):
    running = begin(base, tmp_path / "killed", *OPTIONS, *judge(tmp_path / "killed", {}), *HYBRID)
    kill_in("switch", 2, tmp_path / "killed" / "run" / "logs", running)
    _, err = running.communicate(timeout=patience(180))
    assert running.returncode == 1
    assert (
        "rank 2 died in stage 'switch'" in err and "an engine is not replaced while its cards run stage 'switch'" in err
    )


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
def test_an_engine_of_two_cards_that_replays_graphs_is_replaced(base, tmp_path):
    """The card that is left takes part in a collective of a graph, and says that its peer is lost."""
    replays = ["device.operators=ascend", "rollout.engine.batch_invariant=false", "rollout.engine.graphs=true"]
    cards = ["cluster.npus=5", "fusion.infer_cards=4", "parallel.infer.tp=2"]
    done, folder = run(base, tmp_path / "it", *replays, *cards, kills={12: [2]})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(folder)
    assert len(rows) == STEPS and restarts_of(folder) == 1
    assert sum(row["rollout/graph_steps"] for row in rows) > 10
