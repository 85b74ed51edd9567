"""Conversations in guarded processes: what an environment does wrong fails its own conversation, by kind, and each can
be continued from its actions and digests alone."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from fusion.environments import EnvironmentConfig, EnvPool, StepOrder, Stepped, Task
from fusion.environments.pool import EnvChild
from fusion.rewards import process
from tests.machine import patience, running, wait_for

USER = """
import asyncio, os, re, subprocess, sys, time
from fusion.environments import EnvironmentFailed, Turn

COUNT = {"resets": 0}

class Echo:
    takes_text = {"type": "object", "properties": {"text": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "nothing", "parameters": takes_text}}]

    def __init__(self):
        self.turns = []

    async def reset(self, task, seed):
        COUNT["resets"] += 1
        if task.answer == "raise":
            raise KeyError("no such thing")
        if task.answer == "count":
            return [{"role": "user", "content": str(COUNT["resets"])}]
        if task.answer == "hang":
            await asyncio.sleep(600)
        if task.answer == "nothing":
            return []
        if task.answer == "tools":
            self.tools = [{"sets": {1}}]
        if task.answer == "names of tools":
            self.tools = ["nothing"]
        self.seed, self.task = seed, task
        return [{"role": "user", "content": f"{task.prompt} {seed}"}]

    async def step(self, message):
        text = message["content"]
        self.turns.append(text)
        if text == "raise":
            raise KeyError("no such thing")
        if text == "exit":
            sys.exit(3)
        if text == "cancel":
            raise asyncio.CancelledError
        if text == "fail":
            raise EnvironmentFailed("memory", "said so")
        if text == "fail for a number":
            raise EnvironmentFailed("memory", {3})
        if text == "hang":
            await asyncio.sleep(600)
        if text == "swallow":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        if text == "block":
            time.sleep(600)
        if text == "block holding the interpreter":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if text == "die":
            os._exit(7)
        if text == "crash":
            os.kill(os.getpid(), 11)
        if text == "allocate":
            kept = []
            while True:
                kept.append(bytearray(1 << 20))
        if text == "allocate at once":
            bytearray(1 << 40)
        if text == "text":
            return "hello"
        if text == "assistant":
            return Turn([{"role": "assistant", "content": "I"}])
        if text == "number":
            return Turn([{"role": "user", "content": 3}])
        if text == "id":
            return Turn([{"role": "user", "content": "", "id": "3"}])
        if text == "done":
            return Turn(done=1)
        if text == "nothing":
            return Turn()
        if text == "nan":
            return Turn([{"role": "user", "content": ""}], reward=float("nan"))
        if text == "long":
            return Turn([{"role": "user", "content": "x" * (1 << 20)}])
        if text == "surrogate":
            return Turn([{"role": "user", "content": "\\ud800"}])
        if text == "slow":
            await asyncio.sleep(float(self.task.answer))
        if text == "random":
            return Turn([{"role": "user", "content": os.urandom(4).hex()}])
        if text == "pid":
            return Turn([{"role": "user", "content": str(os.getpid())}])
        if text == "daemon":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return Turn([{"role": "user", "content": str(child.pid)}])
        if text == "torch":
            return Turn([{"role": "user", "content": str("torch" in sys.modules)}])
        if text == "bye":
            return Turn([], done=True, reward=0.5)
        if message["tool_calls"]:
            return Turn([{"role": "user", "content": repr(message["tool_calls"][0]["arguments"])}])
        return Turn([{"role": "user", "content": " ".join(self.turns)}], reward=1)

    async def close(self):
        if self.turns[-1:] == ["die later"]:
            os._exit(7)
        if self.turns[-1:] == ["block later"]:
            time.sleep(600)
        if self.turns[-1:] == ["bye"]:
            raise KeyError("no such file")

class NoStep:
    async def reset(self, task, seed): ...
    def step(self, message): ...
    async def close(self): ...
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_env.py"
    file.write_text(USER)
    return file


class Pool(EnvPool):
    """A pool of ``Echo`` whose results can be awaited, and which keeps actions and digests as a controller does."""

    def __init__(self, file: Path, name: str = "Echo", **changes) -> None:
        self._news = threading.Semaphore(0)
        self.actions: dict[str, list[str]] = {}
        self.observed: dict[str, list[str]] = {}
        options = {"step_timeout_s": patience(20), **changes}
        super().__init__(EnvironmentConfig(name="custom", path=f"{file}:{name}", **options), self._news.release)

    def open(self, *ids: str, answer: str = "") -> None:
        for id, started in zip(ids, self.reset([(Task("hi", answer), 7) for _ in ids]), strict=True):
            self.actions[id], self.observed[id] = [], [started.digest]

    def say(self, id: str, text: str, answer: str = "") -> None:
        order = (*self.actions[id], text)
        self.begin(StepOrder(id, Task("hi", answer), 7, order, tuple(self.observed[id])))
        self.actions[id].append(text)

    def wait(self, count: int = 1, timeout_s: float = 60) -> dict[str, Stepped]:
        ended: dict[str, Stepped] = {}
        while len(ended) < count:
            assert self._news.acquire(timeout=patience(timeout_s)), f"only {sorted(ended)} of {count} ended"
            for one in self.poll():
                ended[one.id] = one
                if one.failure is None:
                    self.observed[one.id].append(one.digest)
                else:
                    self.actions[one.id].pop()
        return ended

    def ask(self, id: str, text: str, answer: str = "") -> Stepped:
        self.say(id, text, answer)
        return self.wait()[id]


def content(stepped: Stepped) -> str:
    assert stepped.turn is not None, stepped
    return stepped.turn.messages[0]["content"]


def test_a_conversation_is_a_reset_and_steps(user_file):
    with Pool(user_file) as pool:
        started, failed = pool.reset([(Task("hello", ""), 3), (Task("hello", "raise"), 3)])
        assert started.turn.messages == [{"role": "user", "content": "hello 3"}]
        takes_text = {"type": "object", "properties": {"text": {"type": "string"}}}
        assert started.tools == [{"type": "function", "function": {"name": "nothing", "parameters": takes_text}}]
        assert failed.turn is None and failed.failure == "raised" and "KeyError" in failed.detail
        pool.open("a", "b")
        assert pool.observed["a"] == pool.observed["b"]
        assert content(pool.ask("a", "x")) == "x"
        assert content(pool.ask("b", "y")) == "y"
        again = pool.ask("a", "z")
        assert (content(again), again.turn.done, again.turn.reward) == ("x z", False, 1.0)
        end = pool.ask("a", "bye")
        assert (end.turn.messages, end.turn.done, end.turn.reward, end.failure) == ([], True, 0.5, None)
        assert content(pool.ask("b", "torch")) == "False"


def test_arguments_are_read_by_the_schemas_of_the_environments_tools(user_file):
    call = "<tool_call>nothing<arg_key>text</arg_key><arg_value>12</arg_value></tool_call>"
    with Pool(user_file, tools="glm45") as pool:
        pool.open("a")
        for _ in range(2):
            assert content(pool.ask("a", call)) == "{'text': '12'}"


def test_a_live_environment_is_sent_the_new_turn_only_and_a_fresh_one_all(user_file, monkeypatch):
    sent, send = [], EnvChild.send
    monkeypatch.setattr(EnvChild, "send", lambda child, data: (sent.append(data), send(child, data)))
    with Pool(user_file, retries=1) as pool:
        pool.open("a")
        del sent[:]
        turns = [f"turn {number}" for number in range(10, 20)]
        assert [content(pool.ask("a", text)) for text in turns][-1] == " ".join(turns)
        assert all(text.encode() in data for text, data in zip(turns, sent, strict=True))
        assert {len(data) for data in sent[1:]} == {len(sent[1])} and b"hi" in sent[0] and b"hi" not in sent[1]
        assert pool.ask("a", "raise").failure == "raised"
        assert content(pool.ask("a", "end")) == " ".join([*turns, "end"])
        assert all(text.encode() in sent[-1] for text in turns)


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("raise", "raised", "KeyError: 'no such thing'"),
        ("exit", "raised", "SystemExit: 3"),
        ("cancel", "raised", "cancelled itself"),
        ("fail", "memory", "said so"),
        ("fail for a number", "memory", "{3}"),
        ("text", "bad_turn", "returned a str"),
        ("assistant", "bad_turn", "of role 'assistant'"),
        ("number", "bad_turn", "and texts"),
        ("id", "bad_turn", "'id': '3'}; expected a mapping with role and content, and nothing else"),
        ("done", "bad_turn", "done=1: expected True or False"),
        ("nothing", "bad_turn", "not done"),
        ("nan", "bad_turn", "reward=nan"),
        ("long", "bad_turn", "expected at most 1,048,576"),
        ("surrogate", "bad_turn", "not valid Unicode"),
        ("hang", "timeout", "environment.step_timeout_s="),
        ("hang", "timeout", "await asyncio.sleep(600)"),
        ("swallow", "timeout", "environment.step_timeout_s="),
        ("block", "timeout", "in step"),
        pytest.param("block holding the interpreter", "timeout", "in step", marks=pytest.mark.extended),
        ("die", "died", "exited with status 7"),
        ("crash", "died", "killed by SIGSEGV"),
        ("allocate", "memory", "memory limit of 256 MiB (environment.memory_mib)"),
        ("allocate at once", "memory", "memory limit of 256 MiB (environment.memory_mib)"),
    ],
)
def test_a_failure_costs_its_own_conversation(user_file, text, kind, detail, monkeypatch):
    """The others of its process, one of them within a step, go on as if nothing had happened."""
    monkeypatch.setattr("fusion.rewards.process.DUMP_WAIT_S", patience(process.DUMP_WAIT_S))
    timeout_s = patience(0.6) if kind == "timeout" else patience(20)
    with Pool(user_file, step_timeout_s=timeout_s, memory_mib=256) as pool:
        slow = "0.2" if kind == "timeout" else "0.05"
        pool.open("bad", "idle", "stepping", answer=slow)
        assert content(pool.ask("idle", "1", slow)) == "1"
        pool.say("stepping", "slow", slow)
        pool.say("bad", text, slow)
        ended = pool.wait(2)
        assert ended["bad"].failure == kind and detail in ended["bad"].detail, ended["bad"]
        assert content(ended["stepping"]) == "slow"
        assert content(pool.ask("idle", "2", slow)) == "1 2"
        assert content(pool.ask("bad", "again", slow)) == "again"


@pytest.mark.parametrize(
    ("answer", "detail"),
    [("nothing", "returned no messages"), ("tools", "are no JSON"), ("names of tools", "expected a list of JSON")],
)
def test_a_beginning_of_something_else_costs_its_own_conversation(user_file, answer, detail):
    with Pool(user_file) as pool:
        pool.open("idle", "stepping", answer="0.1")
        pool.say("stepping", "slow", "0.1")
        (failed,) = pool.reset([(Task("hi", answer), 7)])
        assert failed.failure == "bad_turn" and detail in failed.detail, failed
        assert content(pool.wait()["stepping"]) == "slow"


@pytest.mark.parametrize("text", ["die later", pytest.param("block later", marks=pytest.mark.extended)])
def test_an_environment_that_ends_its_process_in_close_costs_no_other(user_file, text):
    with Pool(user_file, step_timeout_s=patience(0.6 if text == "block later" else 20)) as pool:
        pool.open("bad", "stepping", answer="0.2")
        pool.ask("bad", text, "0.2")
        pool.end(["bad"])
        pool.say("stepping", "slow", "0.2")
        assert content(pool.wait()["stepping"]) == "slow"


def test_a_close_that_fails_is_reported_once(user_file, capfd):
    with Pool(user_file) as pool:
        pool.open("a", "b", "c")
        for id in "abc":
            pool.ask(id, "bye")
        pool.open("d")  # after the last one has been closed
    assert capfd.readouterr().err.count("close failed (raised)") == 1


def test_a_process_killed_from_outside_fails_only_its_own_steps_and_is_replaced(user_file):
    with Pool(user_file, workers=2) as pool:
        ids = ["a", "b", "c", "d"]
        pool.open(*ids, answer="30")
        for id in ids:
            pool.say(id, "pid", "30")
        pid_of = {id: int(content(one)) for id, one in pool.wait(4).items()}
        assert len({*pid_of.values()}) == 2
        for id in ids:
            pool.say(id, "slow", "30")
        wait_for(lambda: sum(len(child.open) for child in pool._children) == len(ids), 20)
        os.kill(pid_of["a"], signal.SIGKILL)
        expected = {id for id in ids if pid_of[id] == pid_of["a"]}
        ended = pool.wait(len(expected))
        assert ended.keys() == expected and {one.failure for one in ended.values()} == {"died"}
        assert all(one.seconds > 0 for one in ended.values())
        pool.end([id for id in ids if id not in expected])
        # A fresh environment says another process: what was observed cannot be repeated.
        assert pool.ask("a", "x", "30").failure == "diverged"
        pool.open("e")
        assert content(pool.ask("e", "x")) == "x"


def test_actions_and_digests_are_enough_to_continue_in_another_pool(user_file):
    with Pool(user_file) as pool:
        pool.open("a", "r")
        pool.ask("a", "x")
        pool.ask("a", "y")
        pool.ask("r", "random")
        actions, observed = pool.actions, pool.observed
    with Pool(user_file) as pool:
        pool.actions, pool.observed = actions, observed
        assert content(pool.ask("a", "z")) == "x y z"
        diverged = pool.ask("r", "z")
        assert (diverged.failure, diverged.turn) == ("diverged", None) and "after turn 1" in diverged.detail
        assert "[{'role': 'user', 'content': '" in diverged.detail, "what it says now"


def test_other_first_messages_than_those_of_the_siblings_are_found(user_file):
    with Pool(user_file) as pool:
        pool.open("a", answer="count")
        diverged = pool.ask("a", "x", "count")
        assert diverged.failure == "diverged" and "at the start" in diverged.detail


def test_the_seconds_of_an_episode_are_bounded_over_its_steps(user_file):
    pause_s = patience(0.4)
    with Pool(user_file, episode_timeout_s=2.5 * pause_s) as pool:
        pool.open("a")
        assert pool.ask("a", "slow", str(pause_s)).failure is None
        assert pool.ask("a", "slow", str(pause_s)).seconds >= pause_s
        failed = pool.ask("a", "slow", str(pause_s))
        assert failed.failure == "timeout" and "environment.episode_timeout_s=" in failed.detail


def test_an_ended_conversation_returns_no_step(user_file):
    with Pool(user_file) as pool:
        pool.open("a", "b", answer="0.3")
        pool.say("a", "slow", "0.3")
        pool.end(["a", "b", "never begun"])
        pool.actions["a"].clear()
        assert content(pool.ask("a", "x", "0.3")) == "x"
        assert content(pool.ask("b", "y", "0.3")) == "y"
        assert pool.poll() == []


def test_no_process_is_left(user_file):
    with Pool(user_file) as pool:
        pool.open("a")
        pids = [int(content(pool.ask("a", text))) for text in ("pid", "daemon")]
        assert all(running(pid) for pid in pids)
    wait_for(lambda: not any(running(pid) for pid in pids), 5)
    for call in (lambda: pool.reset([(Task("", ""), 0)]), pool.poll):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", "defines no 'Missing'"),
        ("NoStep", "expected a class with async methods reset, step, close; step is none"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(user_file, name, message):
    with pytest.raises(ValueError, match=f"environment.path=.*{message}"):
        Pool(user_file, name)


def test_the_environment_of_the_documentation_counts_down(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    file = tmp_path / "count_down.py"
    file.write_text(page.partition("```python\n")[2].partition("```")[0])
    with Pool(file, "CountDown") as pool:
        pool.open("a", "b", answer="2")
        assert content(pool.ask("a", "2", "2")) == "next"
        end = pool.ask("a", "1", "2")
        assert (end.turn.done, end.turn.reward) == (True, 1.0)
        assert pool.ask("b", "3", "2").turn.reward == 0.0
