"""Whole runs whose model speaks in several turns: bitwise again, killed and resumed, with environments that fail."""

import json
import time
from collections import Counter

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import machine
from tests.colocate.cards import tiny_reward_model
from tests.stalesync.conversations import ENVIRONMENT, make_chatting_model
from tests.stalesync.runs import assert_gone, begin, command_of, descendants, kill, rows_of, train, wait_until
from tests.stalesync.stopped_run import BOUNDARIES
from tests.stalesync.test_killed import _figures, _newest, assert_same_weights
from tests.warm import launcher

STEPS = 3
OPTIONS = [
    "environment=custom",
    "reward=environment",
    "data.max_prompt_length=16",
    "data.prompts_per_step=4",
    "rollout.max_response_length=200",
    "training.lr=1e-3",
    f"run.steps={STEPS}",
]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatting")
    make_chatting_model(folder)
    return folder


def environment(folder, name):
    path = folder / "env.py"
    path.write_text(ENVIRONMENT)
    return f"environment.path={path}:{name}"


def samples_of(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def rows_of_groups(run):
    return [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]


def endings_of(run):
    """How every group has ended, once each."""
    rows = rows_of_groups(run)
    endings = {row["group"]: row["ended"] for row in rows}
    assert len(endings) == len(rows), "a group has ended twice"
    return endings


def completed(folder, name, chatting, *options):
    done = train(chatting, folder, *OPTIONS, environment(folder, name), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


AGAIN = ["rollout=batch_invariant", "rollout.max_response_length=200", "run.save_every=1"]


@pytest.fixture(scope="module")
def whole(chatting, tmp_path_factory):
    """A synchronous run that nothing disturbs."""
    return completed(tmp_path_factory.mktemp("whole"), "Env", chatting, *AGAIN)


@pytest.mark.extended
def test_at_staleness_0_a_run_is_bitwise_the_same_again(chatting, whole, tmp_path):
    again = completed(tmp_path, "Slow", chatting, *AGAIN)  # seconds have no effect
    assert_same_weights(again, whole)
    assert samples_of(again) == samples_of(whole)
    evaluations = [(run / "evaluations.jsonl").read_text() for run in (again, whole)]
    assert evaluations[0] == evaluations[1] and '"failed": 0' in evaluations[0]


def test_samples_of_a_run_are_conversations_whose_figures_count_them(whole):
    several = 0
    for sample in samples_of(whole):
        first, *others = sample["messages"]
        assert first["role"] == "user" and first["content"].startswith(sample["prompt"])
        said = [message["content"] for message in others if message["role"] == "assistant"]
        assert [message["role"] for message in others] == (["assistant", "user"] * 4)[: len(others)]
        assert all(text in sample["response"] for text in said)
        several += len(said) > 1
        if len(others) == 6:  # it was not cut
            assert sample["reward"] == sum(map(str.isdigit, said[-1])) / 10
    assert several > 10
    last = rows_of(whole)[-1]
    assert last["env/num_turns/max"] == 3 and last["env/retries_total"] == 0 and last["observation_length/mean"] > 0
    groups = [row for row in rows_of_groups(whole) if row["step"] == STEPS]
    for kind in ("response", "observation"):
        lengths = [length for row in groups for length in row[f"{kind}_tokens"]]
        assert sum(lengths) / len(lengths) == pytest.approx(last[f"{kind}_length/mean"])


@pytest.mark.extended
def test_turns_of_the_assistant_in_the_first_messages_are_part_of_the_prompt(chatting, tmp_path):
    run = completed(tmp_path, "Shots", chatting, "run.steps=1", "run.eval_prompts=0", "data.max_prompt_length=40")
    samples = samples_of(run)
    assert samples and max(map(len, (sample["messages"] for sample in samples))) > 4
    for sample in samples:
        assert [message["role"] for message in sample["messages"][:3]] == ["user", "assistant", "user"]
        assert sample["messages"][1]["content"] == "2>>>2" and "2>>>2" not in sample["response"]


@pytest.mark.extended
def test_a_run_that_is_killed_at_staleness_0_is_bitwise_one_that_is_not(chatting, whole, tmp_path):
    options = [*OPTIONS, environment(tmp_path, "Slow"), *AGAIN]
    run = begin(chatting, tmp_path, *options)
    wait_until(run, 120, lambda: (tmp_path / "run").exists() and _newest(tmp_path / "run") > 0)
    time.sleep(0.4)
    kill(run)
    done = train(chatting, tmp_path, *options, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    of_time = ("rollout/", "switch/", "env/seconds", "env/away")  # seconds, and what is polled while time passes
    ours, theirs = (
        [{name: value for name, value in row.items() if not name.startswith(of_time)} for row in _figures(folder)]
        for folder in (tmp_path / "run", whole)
    )
    assert ours == theirs
    assert_same_weights(tmp_path / "run", whole)


@pytest.mark.extended
def test_a_run_that_is_killed_at_each_boundary_of_a_turn_is_bitwise_one_that_is_not(chatting, whole, tmp_path):
    assert_kills_change_nothing(chatting, whole, tmp_path, BOUNDARIES)


def assert_kills_change_nothing(base, whole, tmp_path, boundaries, *more):
    """Kill a run, with ``more`` options, at each boundary in turn, and compare what it ends as."""
    options, folder = [*OPTIONS, environment(tmp_path, "Env"), *AGAIN, *more], tmp_path / "run"
    for number, boundary in enumerate(boundaries):
        resumed = ["run.resume=true"] if number else []
        mark = tmp_path / boundary
        command = command_of(base, tmp_path, *options, *resumed)
        run = launcher().start(["tests/stalesync/stopped_run.py", boundary, str(mark), *command[1:]])
        wait_until(run, 120, mark.exists)
        kill(run)
        assert 0 < _newest(folder) < rows_of(whole)[-1]["step"], "it was killed under way"
    done = train(base, tmp_path, *options, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_weights(folder, whole)
    assert samples_of(folder) == samples_of(whole) and endings_of(folder) == endings_of(whole)


@pytest.mark.extended
def test_a_reward_model_scores_the_whole_conversation(chatting, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chatting)
    path = tiny_reward_model(tmp_path / "judge", vocab_size=len(tokenizer))
    judge = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    options = [one for one in OPTIONS if not one.startswith("reward=")]
    done = train(chatting, tmp_path, *options, environment(tmp_path, "Env"), f"reward.model={path}", "run.steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    samples, num_turns = samples_of(tmp_path / "run"), 0
    for sample in samples:
        prompt = tokenizer.apply_chat_template(sample["messages"][:1], tokenize=False, add_generation_prompt=True)
        scores = []
        for end in ("", tokenizer.eos_token):  # the text does not show whether the last turn has its end
            ids = tokenizer(prompt + sample["response"] + end, return_tensors="pt")["input_ids"]
            scores.append(judge(ids).logits.item())
        assert any(sample["reward"] == pytest.approx(score, abs=2e-3) for score in scores), (sample["reward"], scores)
        num_turns += sum(message["role"] == "assistant" for message in sample["messages"])
    assert num_turns > len(samples)
    (before, after) = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert before["failed"] == after["failed"] == 0


STALE = [
    "stalesync.max_staleness=1",
    "rollout.schedule.chunk_tokens=16",
    "rollout.kv_pool.suspended=pool",
    "run.save_every=1",
    "run.eval_prompts=0",
    "run.steps=8",
]


@pytest.mark.extended
def test_a_stale_run_that_is_killed_during_turns_loses_no_conversation_and_trains_none_twice(chatting, tmp_path):
    options, folder = [*OPTIONS, environment(tmp_path, "Slow"), *STALE], tmp_path / "run"
    run = begin(chatting, tmp_path, *options)
    wait_until(run, 120, lambda: folder.exists() and _newest(folder) >= 2 and _num_away(folder))
    of_environments = [pid for pid, line in descendants(run.pid).items() if "fusion.environments.child" in line]
    assert of_environments
    kill(run)
    assert _num_away(folder), "no turn was under way in the checkpoint"
    done = train(chatting, tmp_path, *options, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    endings = endings_of(folder)
    assert Counter(endings.values()) == {"trained": 8 * 4}
    recorded = Counter((row["prompt"], row["response"]) for row in samples_of(folder))
    assert {*recorded.values()} == {1}, "a sample was trained twice"
    assert_gone(of_environments)


def _num_away(folder):
    """How many conversations of the last checkpoint wait for their environments."""
    saved = folder / "checkpoints" / f"step-{_newest(folder)}" / "controller.json"
    return [entry["state"] for entry in json.loads(saved.read_text())["buffer"]].count("away")


@pytest.mark.extended
def test_an_environment_that_fails_ends_its_group_by_name_and_no_other(chatting, tmp_path):
    run = completed(
        tmp_path,
        "Failing",
        chatting,
        f"environment.step_timeout_s={machine.patience(1.0)}",
        "environment.retries=1",
        "reward.max_failed_share=1",
        "data.prompts_per_step=12",
        "algorithm.group_size=2",
        "run.steps=1",
    )
    expected = {"0": "raised", "1": "timeout", "3": "diverged", "4": "died", "5": "raised"}
    rows, endings = {sample["prompt"] for sample in samples_of(run)}, endings_of(run)
    failed = {group: ended for group, ended in endings.items() if ended != "trained"}
    assert {*failed.values()} <= {f"failed:env_{kind}" for kind in expected.values()} and len({*failed.values()}) >= 3
    for group, ended in endings.items():
        kind = expected.get(f"{int(group.split('-')[1]):02d}"[0])
        cut = "a conversation that was cut in its first turn asks no environment"
        assert ended == (f"failed:env_{kind}" if kind else "trained") or ended == "trained", (group, ended, cut)
    assert all(prompt[0] in "26789" or prompt[0] in expected for prompt in rows)
    row = rows_of(run)[-1]
    kinds = Counter(ended.replace("failed:env_", "env/failed_") for ended in failed.values())
    assert row["env/failed"] == len(failed) and {**kinds} == {name: row.get(name) for name in kinds}
    assert row["reward/failed"] == 0, "a failure of an environment is no reward"


@pytest.mark.extended
@pytest.mark.parametrize("reward", ["environment", "arithmetic"])
def test_a_run_of_which_every_environment_fails_ends_and_says_why(chatting, tmp_path, reward):
    options = [*OPTIONS, environment(tmp_path, "Broken"), f"reward={reward}", "run.eval_prompts=0", "run.steps=50"]
    done = train(chatting, tmp_path, *options, "environment.retries=0")
    assert done.returncode == 1
    assert "env_raised" in done.stderr and "always broken" in done.stderr, done.stderr


@pytest.mark.extended
def test_an_engine_that_is_killed_during_turns_loses_no_conversation(chatting, tmp_path):
    run = completed(
        tmp_path,
        "Killing",
        chatting,
        "cluster.npus=3",
        "parallel=single",
        "fusion=separate",
        "fusion.infer_cards=2",
        "stalesync.max_staleness=1",
        "run.eval_prompts=0",
        "run.steps=6",
    )
    assert Counter(endings_of(run).values()) == {"trained": 6 * 4}
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows_of(run)) == 1
