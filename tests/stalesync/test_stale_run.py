"""Whole runs in which training and generation run ahead of each other: real Ray, real workers, emulated cards."""

import json
import shutil

import pytest

from fusion.telemetry.run_contents import complete_checkpoints, step_of
from tests.stalesync.runs import kill, rows_of, train, wait_until

STALE = [
    "rollout.max_response_length=60",
    "rollout.sampling.forced_median=8",
    "run.eval_prompts=0",
    "fusion.checksum=true",
]
TWO = ["cluster.npus=2", "parallel=single"]


def _groups(folder):
    return [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]


CHUNKS = ["rollout.schedule.chunk_tokens=6", "rollout.kv_pool.suspended=keep"]
LONG = ["rollout.max_response_length=800", "rollout.sampling.forced_median=100"]
"""Generation takes longer than training, so that weights arrive while samples are generated: otherwise engines that
only generate have finished all that the bound admits"""


@pytest.mark.parametrize(
    ("deployment", "bound", "more"),
    [
        pytest.param("colocated", 1, [], id="colocated", marks=pytest.mark.extended),
        pytest.param("separate", 1, LONG, id="separate", marks=pytest.mark.extended),
        pytest.param("hybrid", 2, CHUNKS, id="hybrid-chunks"),
    ],
)
def test_a_stale_run_keeps_the_bound_and_every_group_ends_once(base, tmp_path, deployment, bound, more):
    steps = 6
    options = [f"run.steps={steps}", f"fusion={deployment}", f"stalesync.max_staleness={bound}", *TWO, *more]
    done = train(base, tmp_path, *STALE, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, groups = rows_of(tmp_path / "run"), _groups(tmp_path / "run")
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps
    assert {row["ended"] for row in groups} == {"trained"} and max(row["lag"] for row in groups) <= bound
    lags = [[row[f"staleness/lag_{lag}_count"] for lag in range(bound + 1)] for row in rows]
    assert [sum(row) for row in lags] == [32] * steps and sum(row[0] for row in lags) < 32 * steps
    assert rows[-1]["distqueue/rows"] == 0, "nothing is left behind"
    assert sum(row["staleness/mixed_versions_count"] for row in rows) > 0
    suspended = sum(row["rollout/suspended_total"] for row in rows)
    assert suspended == 0 if deployment == "separate" else suspended > 0
    interrupted = sum(row.get("rollout/interrupted", 0) for row in rows)
    assert (interrupted > 0) == (deployment == "separate"), "by new weights, where they do not keep their KV"
    if deployment == "colocated":
        figures = "recomputed_tokens", "kv_restored_tokens", "parked_kv_mib_max"
        again, *kept = (sum(row[f"rollout/{figure}"] for row in rows) for figure in figures)
        assert again > 0 and kept == [0, 0]
    if more is CHUNKS:
        assert sum(row["rollout/chunks_total"] for row in rows) > 32
        assert sum(row.get("rollout/kv_restored_tokens", 0) for row in rows) > 0
        assert rows[-1]["rollout/parked_kv_mib_max"] < 1, "what went on elsewhere is forgotten"
    if deployment != "colocated":
        pauses = [row["timing_s/switch/pause"] for row in rows if "timing_s/switch/pause" in row]
        assert len(pauses) >= steps - 2, "cards that only generate go on while their weights arrive"
        assert sum("perf/utilisation" in row for row in rows) >= steps - 1, "and tell what they do meanwhile"
        assert sum(pauses) < sum(row["timing_s/switch"] for row in rows)


@pytest.mark.extended
@pytest.mark.parametrize(
    "reference", [[], ["algorithm.kl_coef=0.01", "algorithm.minibatches=2"]], ids=["", "reference"]
)
@pytest.mark.parametrize("deployment", ["separate", "hybrid"])
def test_cards_train_in_the_tail_of_generation_what_is_ready_and_nothing_twice(base, tmp_path, deployment, reference):
    """In hybrid they return only if the measured tail is longer than the measured switch, which depends on how busy the
    machine is; never in the first step."""
    steps = 8
    options = [f"run.steps={steps}", f"fusion={deployment}", "stalesync.max_staleness=1", *TWO, *LONG]
    done = train(base, tmp_path, *STALE, *options, *reference, "training.lr=1e-3", "training.warmup_steps=1000")
    assert done.returncode == 0, done.stdout + done.stderr
    rows, groups = rows_of(tmp_path / "run"), _groups(tmp_path / "run")
    minibatches = 2 if reference else 1
    rates = [sum(minibatches * step + part + 1 for part in range(minibatches)) / minibatches for step in range(steps)]
    assert [row["actor/lr"] for row in rows] == pytest.approx([1e-6 * rate for rate in rates]), "all optimizer steps"
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps
    assert {row["ended"] for row in groups} == {"trained"} and max(row["lag"] for row in groups) <= 1
    assert all(("actor/kl_loss" in row) == bool(reference) for row in rows)
    assert [row["staleness/lag_0_count"] + row["staleness/lag_1_count"] for row in rows] == [32] * steps
    assert [sum(group["step"] == row["step"] for group in groups) for row in rows] == [8] * steps
    lent_s = [row["rollout/lent_card_s"] for row in rows]
    accumulated = '"accumulate"' in (tmp_path / "run" / "timeline.json").read_text()
    assert accumulated == (deployment == "separate" or sum(lent_s) > 0)
    assert accumulated == any(row["training/parts_total"] > 1 for row in rows)
    assert lent_s[0] == 0 and (deployment == "hybrid" or not sum(lent_s))
    assert rows[-1]["distqueue/rows"] == 0 and rows[-1]["distqueue/ended/done"] == 32 * steps


@pytest.mark.extended
def test_a_run_of_two_epochs_in_the_order_histopipe_keeps_the_bound_and_knows_lengths_in_the_second(base, tmp_path):
    steps = 4
    pipe = [
        "rollout.schedule.order=histopipe",
        "rollout.schedule.length_classes=2",
        "data.rows=16",
        "stalesync.max_staleness=1",
    ]
    done = train(base, tmp_path, *STALE, *TWO, *CHUNKS, *pipe, f"run.steps={steps}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows, groups = rows_of(tmp_path / "run"), _groups(tmp_path / "run")
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps
    assert {row["ended"] for row in groups} == {"trained"} and max(row["lag"] for row in groups) <= 1
    known = ["rollout/length_error_mean" in row for row in rows]
    assert not known[0] and any(known), "whichever step their responses finish in"


@pytest.mark.parametrize(
    "deployment", [pytest.param(name, marks=pytest.mark.extended) for name in ("colocated", "separate")]
)
def test_steps_that_begin_with_so_many_tokens_are_small_and_keep_the_bound(base, tmp_path, deployment):
    steps, threshold = 8, 150
    tokens = [f"stalesync.train_tokens={threshold}", "stalesync.max_staleness=1", "rollout.kv_pool.suspended=keep"]
    done = train(base, tmp_path, *STALE, *TWO, *tokens, f"run.steps={steps}", f"fusion={deployment}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows, groups = rows_of(tmp_path / "run"), _groups(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert len({row["group"] for row in groups}) == len(groups) and max(row["lag"] for row in groups) <= 1
    sizes = [sum(row["step"] == step for row in groups) for step in range(1, steps + 1)]
    assert 0 < max(sizes) <= 8 and sum(sizes[2:]) < 8 * (steps - 2), sizes
    held = [row["perf/total_num_tokens"] for row in rows]
    assert all(tokens >= threshold for tokens in held[:-2]), held
    assert {row["ended"] for row in groups} == {"trained"}
    if deployment == "colocated":
        _suspended_samples_go_on_behind_the_kv_they_had(rows)


def _suspended_samples_go_on_behind_the_kv_they_had(rows):
    found = ("suspended_total", "kv_restored_tokens", "recomputed_tokens", "parked_kv_mib_max")
    suspended, restored, again, parked = (sum(row[f"rollout/{figure}"] for row in rows) for figure in found)
    assert suspended > 0 and sum(row["staleness/mixed_versions_count"] for row in rows) > 0
    assert restored > 0 and parked > 0 and again < restored, "what moved to the other engine, and no more"


@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_dapo_fills_a_step_with_groups_that_teach_something(base, tmp_path, bound):
    options = ["algorithm=dapo", f"stalesync.max_staleness={bound}", "run.steps=2", "run.eval_prompts=0", *TWO]
    done = train(base, tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, groups = rows_of(tmp_path / "run"), _groups(tmp_path / "run")
    trained = [row for row in groups if row["ended"] == "trained"]
    filtered = [row for row in groups if row["ended"].startswith("filtered:")]
    assert len({row["group"] for row in groups}) == len(groups) == len(trained) + len(filtered)
    assert len(trained) == 8 * 2 and filtered, "what all of a group gets right or wrong is made up for"
    for row in rows:
        assert sum(row[f"staleness/lag_{lag}_count"] for lag in range(bound + 1)) == 32
        assert row["critic/advantages/min"] < 0 < row["critic/advantages/max"]


def test_a_run_that_is_killed_goes_on_with_what_was_under_way(base, start, tmp_path):
    options = [*STALE, *TWO, "fusion=hybrid", "stalesync.max_staleness=1", "run.save_every=1"]
    run, steps = start(*options, "run.steps=1000"), 0
    folder = tmp_path / "run"
    # A checkpoint that holds samples which are under way.
    wait_until(run, 60, lambda: list(folder.glob("checkpoints/step-*/queue")) and len(rows_of(folder)) >= 4)
    kill(run)
    steps = max(row["step"] for row in rows_of(folder)) + 3
    done = train(base, tmp_path, *options, f"run.steps={steps}", "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    groups = _groups(folder)
    assert [row["step"] for row in rows_of(folder)] == list(range(1, steps + 1))
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps, "none lost, none twice"
    ended = [row["distqueue/ended/done"] for row in rows_of(folder)]
    assert ended[-1] == 32 * steps, "nor any of their samples"
    assert max(row["lag"] for row in groups) <= 1
    kept = [path for path in folder.glob("checkpoints/step-*") if path.suffix != ".unmarked"]  # one the kill cut short
    assert len(kept) == 2, "the last two are kept"


COMPARING = """
def shortest(prompts, responses, answers, other_responses):
    assert all(len(others) == 3 for others in other_responses), other_responses
    return [float(all(len(one) <= len(other) for other in others))
            for one, others in zip(responses, other_responses, strict=True)]
"""


@pytest.mark.extended
def test_a_killed_run_whose_reward_compares_the_responses_of_a_group_goes_on_with_those_that_waited(
    base, start, tmp_path
):
    (tmp_path / "mine.py").write_text(COMPARING)
    options = [*STALE, *TWO, *CHUNKS, "fusion=hybrid", "stalesync.max_staleness=1", "run.save_every=1", "run.keep=0"]
    options += [f"reward.terms=[{{reward: '{tmp_path}/mine.py:shortest'}}]"]
    run, folder = start(*options, "run.steps=1000"), tmp_path / "run"

    def holding():
        """Steps of the complete checkpoints with finished samples that wait for others of their group."""
        found = complete_checkpoints(folder) if folder.exists() else {}
        return [step for step, path in found.items() if '"held"' in (path / "controller.json").read_text()]

    wait_until(run, 60, holding)
    kill(run)
    resumed = holding()[-1]
    for path in folder.glob("checkpoints/step-*"):
        if (step_of(path.name) or 0) > resumed:  # written while it was being killed
            shutil.rmtree(path)
    steps = resumed + 3
    done = train(base, tmp_path, *options, f"run.steps={steps}", "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    groups, rows = _groups(folder), rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert f"step-{resumed}, step {resumed}" in done.stdout
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps, "none lost, none twice"
    assert rows[-1]["distqueue/ended/done"] == 32 * steps and rows[-1]["distqueue/rows"] == 0
    assert not any(row["reward/failed"] for row in rows)
    shares = [row["critic/rewards/shortest/mean"] for row in rows]
    assert min(shares) >= 0.25, "at least one response of each group is as short as the others"
