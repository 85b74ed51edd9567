"""Whole runs that evaluate: real Ray, real workers, emulated cards."""

import json

import pytest
import torch

from fusion.telemetry.page import read_run
from tests.colocate.cards import tiny_reward_model
from tests.stalesync.runs import FOUR, rows_of, train, weights_of
from tests.stalesync.test_stale_run import CHUNKS, LONG, TWO
from tests.telemetry.test_run_folder import scalars
from tests.warm import launcher

FALLING = """
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def score(prompt, response, answer):
    with CALLS.open("ab") as file:
        file.write(b".")
    return 1000.0 - CALLS.stat().st_size

def fail(prompt, response, answer):
    raise RuntimeError("no such judge")
"""
BEST = "val-core/falling/reward/mean@2"


@pytest.fixture
def files(tmp_path):
    """A file of sums, and a reward that is lower at every evaluation."""
    sums, reward = tmp_path / "sums.jsonl", tmp_path / "falling.py"
    sums.write_text("".join(json.dumps({"prompt": f"{n}+3=", "answer": n + 3}) + "\n" for n in range(6)))
    reward.write_text(FALLING)
    return sums, reward


def evaluating(sums, reward=None, name="sums"):
    own = "" if reward is None else f",reward: '{reward}'"
    return [f"eval.files=[{{path: {sums}, name: {name}{own}}}]", "eval.every=1", "eval.samples=2"]


def evaluations(run):
    """Results by file and step."""
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    found = {(row["file"], row["step"]): row for row in rows}
    assert len(found) == len(rows), "each step was evaluated once"
    return found


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.extended
def test_the_best_checkpoint_stays_a_resume_goes_on_and_a_checkpoint_alone_is_evaluated_to_the_same_bits(
    base, tmp_path, files
):
    sums, reward = files
    options = [*evaluating(sums, f"{reward}:score", name="falling"), f"eval.best={BEST}"]
    options += ["run.save_every=1", "run.keep=1", "training.lr=1e-3", "eval.top_p=0.9", "eval.max_response_length=2"]
    run = tmp_path / "run"
    for steps in (2, 3):
        done = train(base, tmp_path, *options, f"run.steps={steps}", f"run.resume={steps == 3}")
        assert done.returncode == 0, done.stdout + done.stderr
        history = evaluations(run)
        assert history.keys() == {(name, step) for name in ("held_out", "falling") for step in range(steps + 1)}
        assert checkpoints(run) == ["step-1", f"step-{steps}"]
        best = json.loads((run / "best.json").read_text())
        value = history["falling", 1]["estimates"]["reward/mean@2"]["value"]
        assert best == {"metric": BEST, "value": value, "step": 1, "checkpoint": "checkpoints/step-1"}
        assert f"best checkpoint: checkpoints/step-1, {BEST}" in done.stdout
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        found = history["held_out", row["step"]]["estimates"]["reward/pass@2"]
        name = "held_out/reward/pass@2"
        assert row[f"val-core/{name}"] == found["value"] and row[f"val-aux/{name}/high"] == found["high"]
        assert row["timing_s/testing"] > 0
    for row, when, step in ((rows[0], "before", 0), (rows[1], "after", 2), (rows[2], "after", 3)):
        value = history["held_out", step]["estimates"]["reward/mean@2"]["value"]
        assert row[f"val/rewards/{when}"] == value
    assert sum("val/rewards/before" in row for row in rows) == 1
    assert {row["estimates"]["response_length/mean@2"]["value"] <= 2 for row in history.values()} == {True}
    assert max(row["response_length/max"] for row in rows) > 2, "only evaluations have the limit of evaluations"

    for source, name, step in ((run, "run", 3), (run / "checkpoints" / "step-1", "run-step-1", 1)):
        printed = ["--json", "-"] if source == run else []
        command = ["scripts/evaluate.py", str(source), "eval.files=[]", f"run.dir={tmp_path}", *printed]
        done = launcher().session().run(command, 180)
        assert done.returncode == 0, done.stdout + done.stderr
        table = done.stderr if printed else done.stdout
        assert "evaluation   step   answers" in table and f"evaluation after step {step}: " in table
        (row,) = (tmp_path / f"evaluate-{name}" / "evaluations.jsonl").read_text().splitlines()
        assert json.loads(row)["step"] == step
        assert scalars(tmp_path / f"evaluate-{name}" / "tensorboard")["val-aux/held_out/reward/failed"] == [(step, 0.0)]
        assert read_run(tmp_path / f"evaluate-{name}")["outcome"] == "finished"
        written = json.loads(
            done.stdout if printed else (tmp_path / f"evaluate-{name}" / "evaluation.json").read_text()
        )
        assert (written["model"], written["step"]) == (str(source), step)
        assert written["checkpoint"] == str(run / "checkpoints" / f"step-{step}")
        (result,) = written["results"]
        expected = history["held_out", step]
        assert result["estimates"] == expected["estimates"] and result["answers"] == expected["answers"]
    assert not (tmp_path / "evaluate-run" / "checkpoints").exists()


@pytest.mark.extended
def test_an_evaluation_that_is_due_where_a_run_resumes_is_in_the_row_of_its_step_and_may_be_the_best(
    base, tmp_path, files
):
    sums, reward = files
    common = ["run.save_every=1", "run.keep=1", "training.lr=1e-3"]
    done = train(base, tmp_path, *common, "run.steps=2", "run.eval_prompts=0")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    before, added = rows_of(run), [*evaluating(sums, f"{reward}:score", name="falling"), f"eval.best={BEST}"]
    done = train(base, tmp_path, *common, "run.steps=3", "run.eval_prompts=0", "run.resume=true", *added)
    assert done.returncode == 0, done.stdout + done.stderr
    history, rows = evaluations(run), rows_of(run)
    assert history.keys() == {("falling", 2), ("falling", 3)} and [row["step"] for row in rows] == [1, 2, 3]
    for row in rows[1:]:
        assert row[BEST] == history["falling", row["step"]]["estimates"]["reward/mean@2"]["value"]
    assert rows[0] == before[0] and before[1].items() <= rows[1].items() and rows[1]["timing_s/testing"] > 0
    assert not any("val/rewards/before" in row for row in rows)
    assert json.loads((run / "best.json").read_text())["step"] == 2 and checkpoints(run) == ["step-2", "step-3"]

    data = bytearray((run / "evaluations.jsonl").read_bytes())
    data[data.index(b".", data.index(b'"value"')) + 1] ^= 1
    (run / "evaluations.jsonl").write_bytes(data)
    done = train(base, tmp_path, *common, "run.steps=3", "run.eval_prompts=0", "run.resume=true", *added)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluations.jsonl: damaged rows were dropped (1)" in done.stdout and rows_of(run) == rows
    assert evaluations(run) == {("falling", 3): history["falling", 3]}
    assert json.loads((run / "best.json").read_text())["step"] == 3


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="colocated"),
        pytest.param(["fusion=separate", *TWO], id="separate"),
        pytest.param(["rollout.schedule.chunk_tokens=2", "rollout.kv_pool.suspended=pool"], id="chunks"),
        pytest.param(["fusion=hybrid", *FOUR, "parallel=tp2ep2_ep2"], id="hybrid"),
    ],
)
def test_evaluations_do_not_change_a_bit_of_a_run_at_staleness_0_and_repeat_to_the_bit(base, tmp_path, files, options):
    common = [*options, "run.steps=3", "training.lr=1e-3"]
    ways = {"without": ["run.eval_prompts=0"], "with": evaluating(files[0]), "again": evaluating(files[0])}
    for name, way in ways.items():
        done = train(base, tmp_path, f"run.name={name}", *common, *way)
        assert done.returncode == 0, done.stdout + done.stderr
    for figure in ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean"):
        curves = [[row[figure] for row in rows_of(tmp_path / name)] for name in ways]
        assert curves[0] == curves[1] == curves[2], figure
    first, second = (weights_of(tmp_path / name / "hf") for name in ("without", "with"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert evaluations(tmp_path / "with") == evaluations(tmp_path / "again")
    assert len({json.dumps(row["estimates"]) for row in evaluations(tmp_path / "with").values()}) > 1


@pytest.mark.extended
@pytest.mark.parametrize(
    ("deployment", "bound", "more"),
    [
        pytest.param("colocated", 1, [], id="colocated"),
        pytest.param("separate", 1, LONG, id="separate"),
        pytest.param("hybrid", 2, CHUNKS, id="hybrid-chunks"),
    ],
)
def test_a_stale_run_is_evaluated_after_every_step_and_its_groups_end_once(
    base, tmp_path, files, deployment, bound, more
):
    steps = 4
    stale = ["rollout.max_response_length=60", "rollout.sampling.forced_median=8", f"stalesync.max_staleness={bound}"]
    done = train(
        base, tmp_path, *TWO, f"fusion={deployment}", *stale, *more, f"run.steps={steps}", *evaluating(files[0])
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    assert evaluations(run).keys() == {(name, step) for name in ("held_out", "sums") for step in range(steps + 1)}
    groups = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps
    assert {row["ended"] for row in groups} == {"trained"} and max(row["lag"] for row in groups) <= bound
    assert rows_of(run)[-1]["distqueue/rows"] == 0, "nothing is left behind"


@pytest.mark.extended
def test_a_reward_model_scores_held_out_prompts_and_a_rule_scores_a_file(base, tmp_path, files):
    judge = tiny_reward_model(tmp_path / "judge")
    options = [*FOUR, "parallel=tp2ep2_ep2", "fusion=full", f"reward.model={judge}", "run.steps=2"]
    done = train(base, tmp_path, *options, *evaluating(files[0], "arithmetic"))
    assert done.returncode == 0, done.stdout + done.stderr
    found, rows = evaluations(tmp_path / "run"), rows_of(tmp_path / "run")
    assert {file: row["reward"] for (file, _), row in found.items()} == {"held_out": str(judge), "sums": "arithmetic"}
    assert all("reward/mean@2" in row["estimates"] for row in found.values())
    assert rows[-1]["distqueue/rows"] == 0


def test_a_file_whose_reward_fails_ends_the_run_before_its_first_step_and_is_named(base, tmp_path, files):
    sums, reward = files
    done = train(base, tmp_path, "run.steps=2", *evaluating(sums, f"{reward}:fail"))
    assert done.returncode == 1
    named = f"evaluation of 'sums' ({sums}) with the reward {reward}:fail after step 0: none of 12 answers"
    assert named in done.stderr and "no such judge" in done.stderr, done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
