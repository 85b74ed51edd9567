"""Whole runs, as a user starts them: real Ray, real workers, emulated cards."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from fusion.telemetry.files import read_jsonl
from fusion.telemetry.page import read_run
from stalesync.job.overrides import load
from tests import machine
from tests.colocate.cards import tiny_reward_model
from tests.helpers import tiny_checkpoint
from tests.machine import communicate, within
from tests.stalesync import straight_line
from tests.stalesync.runs import (
    FOUR,
    JUDGE,
    assert_gone,
    begin,
    descendants,
    rows_of,
    train,
    wait_until,
    weights_of,
)
from tests.stalesync.test_ports import check_ports
from tests.warm import ROOT

PROMISED = """critic/rewards/mean actor/pg_loss actor/kl_loss actor/grad_norm response_length/mean timing_s/gen
timing_s/switch timing_s/card/decode perf/throughput perf/utilisation memory/infer/kv_mib
memory/train/optimizer_mib perf/overlap timing_s/step_floor rollout/draft_share_mean""".split()


def test_four_cards_train_and_leave_a_readable_run(base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loggers = "run.loggers=[tensorboard,tests.telemetry.loggers.to_file:ToFile]"
    done = train(base, tmp_path, *FOUR, "run.steps=2", "algorithm.kl_coef=0.01", "fusion.checksum=true", loggers)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    rows = rows_of(run)
    start, before, *logged, end = read_jsonl(run / "own.jsonl")
    assert before["step"] == 0 and "val-core/held_out/reward/mean@1" in before, (
        "of the evaluation before the first step"
    )
    assert logged == rows and start["steps"] == 2 and end == {"closed": True}
    assert "finished: 2 steps" in done.stdout and "report.html" in done.stdout
    assert "on average, with a median of" not in done.stdout, "lengths that only a plan assumes"
    assert "finished" in (run / "report.html").read_text()
    assert [row["step"] for row in rows] == [1, 2]
    for name in PROMISED:
        assert name in rows[0], name
    assert rows[0]["memory/infer/optimizer_mib"] == rows[0]["memory/infer/gradients_mib"] == 0
    assert rows[0]["memory/train/kv_mib"] == 0
    assert 0 <= rows[0]["val/rewards/before"] <= 1 and 0 <= rows[1]["val/rewards/after"] <= 1
    for row in rows:
        bytes_read, bytes_saved = (row[f"distqueue/{name}_bytes_total"] for name in ("read", "padding_saved"))
        assert bytes_read > 0 and 0 <= bytes_saved < 5 * bytes_read, "responses have 1 to 5 tokens"
        requests, saved = (row[f"distqueue/read_requests_{name}"] for name in ("total", "saved_total"))
        assert requests > 0 and saved == requests, "two ranks of TP2 read together"
        assert row["perf/overlap"] == row["rollout/draft_share_mean"] == 0
        assert 0 < row["timing_s/step_floor"] < row["timing_s/step"]
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["parallel"]["train"] == {"tp": 2, "ep": 2, "pp": 1, "etp": 1, "cp": 1}
    assert saved["device"]["operators"] == "cpu", "auto of emulated cards"
    assert not [*run.glob("config.start-*")]
    page = read_run(run)
    assert [card["card"] for card in page["cards"]["table"]] == [f"card {rank}" for rank in range(4)]
    assert {"prefill", "decode", "train", "save", "wait_data"} <= set(page["cards"]["table"][0]["seconds"])
    assert page["memory"]["phases"] and page["memory"]["peak"]["train"] > 0
    assert all(0 < row["perf/utilisation"] < 1 for row in rows)
    assert {"prompt", "response", "reward"} <= set(json.loads((run / "samples.jsonl").read_text().splitlines()[0]))
    _, info = AutoModelForCausalLM.from_pretrained(run / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(run / "hf")) == 32
    for promise in ("before", "after", "metrics.jsonl", "What to try next"):
        assert promise in done.stdout


@pytest.mark.extended  # card by card: tests/colocate/test_deployments.py
def test_a_run_that_is_deployed_otherwise_is_bitwise_the_one_on_one_card(base, tmp_path):
    kinds = {"one": [], "separate": ["fusion=separate", "cluster.npus=2", "fusion.checksum=true"]}
    common = ["run.steps=3", "run.eval_prompts=0", "algorithm.kl_coef=0.01"]
    for name, options in kinds.items():
        done = train(base, tmp_path, f"run.name={name}", *common, *options)
        assert done.returncode == 0, done.stdout + done.stderr
    for figure in ("critic/rewards/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "response_length/mean"):
        curves = {name: [row[figure] for row in rows_of(tmp_path / name)] for name in kinds}
        assert curves["one"] == curves["separate"], figure


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        pytest.param([], (2, 3), id="resumed"),
        pytest.param(
            [
                "rollout.schedule.chunk_tokens=2",
                "rollout.kv_pool.suspended=pool",
                "rollout.engine.batch_invariant=true",
            ],
            (3,),
            id="chunks",
        ),
        pytest.param(
            [
                "rollout.drafts.source=both",
                "rollout.drafts.tree=2",
                "data.rows=8",
                "rollout.engine.batch_invariant=true",
            ],
            (5,),
            id="drafts",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_staleness_0_is_the_straight_line_to_the_bit(base, tmp_path, options, starts):
    """Also where a run that has finished goes on for more steps."""
    for steps in starts:
        resume = "run.resume=true" if steps != starts[0] else "run.resume=false"
        options_of_start = [f"run.steps={steps}", resume, "run.eval_prompts=0", "training.lr=1e-3", *options]
        done = train(base, tmp_path, *options_of_start)
        assert done.returncode == 0, done.stdout + done.stderr
    assert ("resuming from" in done.stdout) == (len(starts) > 1)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [*range(1, starts[-1] + 1)]
    rewards = straight_line.run(load(tmp_path / "run" / "config.yaml"), tmp_path / "straight")
    assert [row["critic/rewards/mean"] for row in rows_of(tmp_path / "run")] == rewards
    for option, figure in (
        ("rollout.schedule.chunk_tokens=2", "chunks_total"),
        ("rollout.drafts.source=both", "drafted_tokens"),
    ):
        assert (option in options) == (sum(row[f"rollout/{figure}"] for row in rows_of(tmp_path / "run")) > 0)
    ours, theirs = (weights_of(tmp_path / folder) for folder in ("run/hf", "straight"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_four_roles_on_four_cards_a_queue_that_is_killed_and_a_request_that_changes_who_generates(start, tmp_path):
    reward = tiny_reward_model(tmp_path / "judge")
    """And Ctrl-C leaves a readable run and no process."""
    full = [*FOUR, "parallel=tp2ep2_ep2", "fusion=full", f"reward.model={reward}", "algorithm.kl_coef=0.01"]
    run = start(*full, "run.steps=1000", "queue.durability=journal")
    folder = tmp_path / "run"
    (queue,) = [pid for pid, command in descendants(run.pid).items() if "ray::QueueActor" in command]
    os.kill(queue, signal.SIGKILL)
    command = [sys.executable, "scripts/control.py", str(folder)]
    asked = subprocess.run(
        [*command, "engines=1", "rollout.engine.max_seqs=2"], cwd=ROOT, capture_output=True, text=True
    )
    assert asked.returncode == 0 and "engines=1" in asked.stdout, asked.stderr
    rows = wait_until(run, 60, lambda: [row for row in rows_of(folder) if row["rollout/engines"] == 1])
    below = descendants(run.pid)
    check_ports(run)
    run.send_signal(signal.SIGINT)
    out, err = communicate(run, 60)
    assert run.returncode == 130 and "Traceback" not in err, err
    assert "stopped" in out and "metrics.jsonl" in out
    assert json.loads((folder / "timeline.json").read_text())
    assert_gone(below)
    first = rows_of(folder)[0]
    assert first["rollout/engines"] == 2 and first["rollout/kv_tokens_min"] > rows[0]["rollout/kv_tokens_min"]
    assert first["memory/reward/weights_mib"] > 0 and first["memory/reference/weights_mib"] > 0
    assert first["reward/failed"] == 0 and first["critic/rewards/std"] > 0
    assert first["distqueue/ended/done"] == 32 and first["distqueue/rows"] == 0
    *_, last = (row for row in rows_of(folder) if "distqueue/ended/done" in row)  # a stopped step has none
    assert last["distqueue/ended/done"] == 32 * last["step"], "the journal went on where the queue was killed"
    (record,) = [json.loads(line) for line in (folder / "control.jsonl").read_text().splitlines()]
    assert record["outcome"] == "applied" and record["step"] == rows[0]["step"]
    assert "actor_train 0-3, actor_generation 0-3, reference 0-3, reward_model 0-3" in out
    for part in ("reshard", "reshard/exchange", "offload", "onload", "kv"):
        assert last[f"timing_s/switch/{part}"] > 0, part


def test_rewards_that_fail_are_counted_and_shown_and_the_loop_goes_on(base, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    judge = [f"reward.path={tmp_path / 'judge.py'}:score", "reward.time_limit_s=0.3", "reward.workers=1"]
    done = train(base, tmp_path, *judge, "run.steps=2", "run.eval_prompts=0")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    failed = {kind: sum(row[f"reward/failed_{kind}"] for row in rows) for kind in ("raised", "timeout", "bad_type")}
    assert min(failed.values()) > 0 and sum(failed.values()) == sum(row["reward/failed"] for row in rows) < 64, failed
    assert "a sample failed" in done.stderr and "judge.py" in done.stderr, "shown once, with where it came from"
    assert "could not be scored" in done.stdout


@pytest.mark.extended
def test_a_run_whose_rewards_all_fail_ends_early_with_the_first_failure(base, tmp_path):
    (tmp_path / "judge.py").write_text("def score(prompt, response, answer): raise KeyError('no judge')")
    done = train(base, tmp_path, f"reward.path={tmp_path / 'judge.py'}:score", "run.steps=40", "run.eval_prompts=0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "error: reward.max_failed_share=0.5: 64 of the last 64 samples could not be scored (64 raised)" in done.stderr
    )
    assert "KeyError: 'no judge'" in done.stderr and len(rows_of(tmp_path / "run")) < 3


def test_a_reward_that_requires_an_absent_field_is_refused_before_a_card_starts(base, tmp_path):
    (tmp_path / "judge.py").write_text("def score(prompt, response, answer, level): return 0.0")
    done = train(base, tmp_path, f"reward.path={tmp_path / 'judge.py'}:score")
    assert done.returncode == 1
    assert "judge.py:score': the reward requires the field 'level', which the data lacks" in done.stderr
    assert "every row has: solution" in done.stderr and "start Ray" not in done.stdout + done.stderr


def test_reference_and_reward_model_score_on_a_card_of_their_own(base, tmp_path):
    reward = tiny_reward_model(tmp_path / "judge", max_position_embeddings=6)
    score = ["cluster.npus=2", "fusion.score_cards=1", f"reward.model={reward}", "algorithm.kl_coef=0.01"]
    score += ["reward.max_failed_share=1"]  # half of the samples are too long for it
    done = train(base, tmp_path, *score, "run.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "actor_train 0, actor_generation 0, reference 1, reward_model 1" in done.stdout
    rows = rows_of(tmp_path / "run")
    failed = sum(row["reward/failed_too_long"] for row in rows)
    assert 0 < failed < 64 and failed == sum(row["reward/failed"] for row in rows), "counted by name, not trained"
    spans = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    stages = [{span["name"] for span in spans if span["pid"] == pid and "dur" in span} for pid in (1, 2)]
    assert {"generate", "train"} <= stages[0] - stages[1]
    assert stages[1] == {"prepare", "wait_data", "read", "score", "reference"}
    assert rows[0]["critic/rewards/std"] > 0 and rows[0]["actor/kl_loss"] < 1e-6


@pytest.mark.extended
def test_questions_of_a_file_are_asked_and_scored_by_math_verify(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {piece: index + 1 for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE({"<eos>": 0} | alphabet, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model = tiny_checkpoint(tmp_path / "model", experts=False, vocab_size=257, eos_token_id=0)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(model)
    rows = [{"question": f"What is {a} plus {a}?", "answer": f"{a}+{a}={2 * a}\n#### {2 * a}"} for a in range(20)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["data.prompts_per_step=4", "data.max_prompt_length=64", "rollout.max_response_length=16", "run.steps=2"]
    recipe = ["bash", "recipes/math_jsonl.sh", str(questions), str(model), "device=emulated", f"run.dir={tmp_path}"]
    paths = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    environment = os.environ | paths | {"extra": "test"}
    done = machine.run([*recipe, *small], timeout_s=180, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "math-jsonl")
    assert len(rows) == 2 and all(row["reward/failed"] == 0 and "critic/rewards/mean" in row for row in rows)
    asked = json.loads((tmp_path / "math-jsonl" / "samples.jsonl").read_text().splitlines()[0])
    assert asked["prompt"].startswith("What is ")


@pytest.mark.extended
def test_the_recipe_of_long_context_runs_at_toy_size(tmp_path):
    small = ["run.steps=1", "run.eval_prompts=2", "data.max_digits=96", "rollout.max_response_length=96"]
    recipe = ["bash", "recipes/long_context.sh", f"run.dir={tmp_path}", *small, "run.sample_characters=64"]
    paths = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    environment = os.environ | paths | {"extra": "test"}
    done = machine.run(recipe, timeout_s=240, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(tmp_path / "long-context")
    assert row["reward/failed"] == 0 and row["response_length/max"] == 96
    assert 0.3 < row["critic/rewards/mean"] <= 1
    samples = [json.loads(line) for line in (tmp_path / "long-context" / "samples.jsonl").read_text().splitlines()]
    long = [sample for sample in samples if "abridged" in sample]
    assert long and all(len(sample["response"]) <= 64 for sample in samples if sample not in long)
    for sample in long:
        start, note, end = sample["response"].split("\n")
        assert sample["abridged"] == 64 == len(start + end) and "characters left out" in note


def test_a_card_that_runs_out_of_memory_says_rank_stage_and_who_holds_what(base, tmp_path):
    failed = train(base, tmp_path, "run.steps=1", "device.capacity_bytes=1500000")
    assert failed.returncode == 1 and "error: rank 0 failed in stage '" in failed.stderr
    assert "weights" in failed.stderr and "optimizer" in failed.stderr, "a table by owner"
    log = tmp_path / "run" / "run.log"
    assert failed.stderr.splitlines()[-1] == f"every rank's log and the traceback: {log}"
    failure = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (failure["error"], failure["kind"], failure["rank"]) == ("OutOfMemory", "out_of_memory", 0)
    assert f"stage {failure['stage']!r}" in failed.stderr and failure["traceback"].startswith("Traceback")
    text = log.read_text()
    assert (
        text.startswith(f"rank 0, stage {failure['stage']!r}") and "INFO fusion.colocate.failures: stage prep" in text
    )


def test_a_killed_worker_ends_the_run_within_15_s_naming_rank_and_stage(start, tmp_path):
    run = start("cluster.npus=2", "parallel.train.tp=2", "parallel.infer.ep=2", "run.steps=1000")
    below = descendants(run.pid)
    workers = [pid for pid, command in below.items() if "ray::Card" in command]
    assert len(workers) == 2
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in workers] == [os.getpriority(os.PRIO_PROCESS, run.pid)] * 2
    killed = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    out, err = communicate(run, 60)
    assert within(time.monotonic() - killed, 15)
    assert run.returncode != 0
    assert "died in stage '" in err and "error: rank " in err, err
    assert len(rows_of(tmp_path / "run")) >= 2 and "failed" in out
    failure = json.loads((tmp_path / "run" / "error.json").read_text())
    assert failure["kind"] == "died" and failure["rank"] in (0, 1) and failure["step"] > 2
    lines = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert lines[0].startswith(f"rank {failure['rank']}, stage {failure['stage']!r}, step {failure['step']}, host ")
    for rank in (0, 1):
        assert (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text().rstrip().splitlines()[-1] in lines
    assert_gone(below)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("killed", "ended"), [("gcs_server", "gcs_server"), ("ray::DashboardAgent", "raylet")], ids=["gcs", "agent"]
)
def test_a_run_whose_ray_is_killed_names_it_and_leaves_its_record(start, tmp_path, killed, ended):
    """Ray would end the controller after a minute, without a word; without its agent the raylet kills queue and cards,
    and ends then."""
    run = start("run.steps=1000")
    below = descendants(run.pid)
    pid = next(pid for pid, command in below.items() if killed in command)
    os.kill(pid, signal.SIGKILL)
    out, err = communicate(run, 40)
    assert run.returncode == 1 and f"error: Ray's process {ended} has ended" in err and "failed: " in out, err
    assert json.loads((tmp_path / "run" / "error.json").read_text())["error"] == "RayEnded"
    assert_gone(below, within_s=20)


@pytest.mark.parametrize(
    "moment",
    [
        "Ray starts",
        pytest.param("cards start", marks=pytest.mark.extended),
        pytest.param("step", marks=pytest.mark.slow),
    ],
)
def test_sigterm_ends_a_run_as_stopped_whenever_it_comes(base, tmp_path, moment):
    """Ray takes the signal over when it starts."""
    run = begin(base, tmp_path, "run.steps=1000", "run.eval_prompts=0")
    reached = {
        "Ray starts": lambda: [line for line in descendants(run.pid).values() if "gcs_server" in line],
        "cards start": lambda: [line for line in descendants(run.pid).values() if "ray::Card" in line],
        "step": lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(rows_of(tmp_path / "run")) > 2,
    }[moment]
    wait_until(run, 120, reached)
    below = descendants(run.pid)
    run.send_signal(signal.SIGTERM)
    out, err = communicate(run, 60)
    assert run.returncode == 143 and "Traceback" not in err, err
    assert "stopped by SIGTERM: " in out
    assert not {"error.json", "run.log"} & {path.name for path in (tmp_path / "run").iterdir()}
    assert_gone(below, within_s=20)
