"""Who pays when a reward fails: one sample, by name, and nobody else."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion.rewards import RewardConfig, RewardPool, RewardSample, reward_metrics
from fusion.rewards.child import result_of
from fusion.rewards.process import Child
from tests.machine import patience, running, wait_for, within

USER = """
import os, re, subprocess, sys, time

def reward(prompt, response, answer, **fields):
    if response == "raise":
        raise KeyError("no such thing")
    if response == "exit":
        sys.exit(3)
    if response == "hang":
        time.sleep(600)
    if response == "hang holding the interpreter":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if response == "string":
        return "1.0"
    if response == "none":
        return None
    if response == "nan":
        return float("nan")
    if response == "beyond float32":
        return 1e39
    if response == "huge":
        return 10 ** 400
    if response == "die":
        os._exit(7)
    if response == "signal without a name":
        os.kill(os.getpid(), 40)
    if response == "crash":
        os.kill(os.getpid(), 11)
    if response == "grandchild":
        subprocess.Popen(["sleep", "599.25"])
        time.sleep(600)
    if response == "pid":
        return os.getpid()
    if response == "torch":
        return "torch" in sys.modules
    return float(response) + fields.get("bonus", 0)

def narrow(prompt, response, answer, bonus=0):
    return bonus

def two(prompt, response):
    return 0.0
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_reward.py"
    file.write_text(USER)
    return file


def pool_of(file: Path, function: str = "reward", **changes) -> RewardPool:
    options = {"workers": 1, "time_limit_s": patience(0.5), **changes}
    return RewardPool(RewardConfig(path=f"{file}:{function}", **options))


def samples(*responses: str) -> list[RewardSample]:
    return [RewardSample("prompt", response, "answer") for response in responses]


def gone(pid: int, within_s: float = 5.0) -> bool:
    try:
        wait_for(lambda: not running(pid), within_s)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("response", "error", "detail"),
    [
        ("raise", "raised", "KeyError: 'no such thing'"),
        ("exit", "raised", "SystemExit: 3"),
        ("hang", "timeout", "in reward"),
        pytest.param("hang holding the interpreter", "timeout", "in reward", marks=pytest.mark.extended),
        ("string", "bad_type", "returned '1.0' (str); expected a finite number"),
        ("none", "bad_type", "returned None"),
        ("nan", "bad_type", "returned nan"),
        ("huge", "bad_type", "returned 1000"),
        ("beyond float32", "bad_type", "returned 1e+39 (float); expected a finite number of float32"),
        ("die", "died", "exited with status 7"),
        ("crash", "died", "killed by SIGSEGV"),
        ("signal without a name", "died", "killed by signal 40"),
    ],
)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_a_failure_costs_its_own_sample(user_file, response, error, detail, workers, caplog):
    with pool_of(user_file, workers=workers) as pool, caplog.at_level(logging.WARNING):
        outcomes = pool.score(samples("1", "2", response, "3", "4"))
        assert [o.reward for o in outcomes] == [1.0, 2.0, None, 3.0, 4.0]
        assert [o.error for o in outcomes] == [None, None, error, None, None]
        assert detail in outcomes[2].detail
        again = pool.score(samples(response, "5"))
        assert [o.reward for o in again] == [None, 5.0]
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 1 and detail in shown[0] and str(user_file) in shown[0]


@pytest.mark.parametrize("value", [np.bool_(True), np.float32(1), np.array(1), torch.tensor(1.0), {"score": np.True_}])
def test_a_scalar_of_numpy_or_torch_is_a_number_and_a_list_is_not(value):
    assert result_of(value).reward == 1
    assert result_of(np.array([1.0])).error == result_of(np.str_("1")).error == "bad_type"


def test_a_stack_is_read_to_its_end_though_the_child_is_interrupted_while_it_writes():
    pieces = ["Stack (most recent call first):\n", '  File "my_reward.py", line 12 in rew', "ard\n"]
    with tempfile.TemporaryFile() as trace:

        def write():
            for piece in pieces:
                os.write(trace.fileno(), piece.encode())
                time.sleep(0.06)

        process = SimpleNamespace(send_signal=lambda number: threading.Thread(target=write).start())
        child = object.__new__(Child)
        child.process, child._trace = process, trace
        assert child.dump_stack() == "".join(pieces)


def test_a_time_limit_is_per_sample_and_kept(user_file):
    limit_s = patience(0.4)
    with pool_of(user_file, time_limit_s=limit_s) as pool:
        started = time.monotonic()
        outcomes = pool.score(samples("hang", "1", "hang"))
        took = time.monotonic() - started
    assert [o.error for o in outcomes] == ["timeout", None, "timeout"]
    assert 2 * limit_s <= took and within(took, 10 * limit_s)
    assert all(limit_s <= outcomes[i].seconds and within(outcomes[i].seconds, 5 * limit_s) for i in (0, 2))


def test_order_and_every_sample_once_among_failures(user_file):
    responses = [str(i) for i in range(60)]
    for at, bad in ((0, "die"), (7, "raise"), (8, "die"), (31, "hang"), (59, "string")):
        responses[at] = bad
    with pool_of(user_file, workers=2, time_limit_s=patience(0.3)) as pool:
        outcomes = pool.score(samples(*responses))
    assert [o.reward for o in outcomes] == [float(r) if r.isdigit() else None for r in responses]
    figures = reward_metrics([o.reward for o in outcomes], [o.error for o in outcomes])
    assert figures["reward/failed"] == 5 and figures["reward/failed_died"] == 2
    assert figures["reward/failed_share"] == 5 / 60
    assert figures["reward/failed_timeout"] == figures["reward/failed_raised"] == figures["reward/failed_bad_type"] == 1
    scored = [o.reward for o in outcomes if o.reward is not None]
    assert figures["critic/rewards/mean"] == pytest.approx(sum(scored) / len(scored))


KINDS = {"raise": "raised", "string": "bad_type", "die": "died", "hang": "timeout"}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    responses=st.lists(st.sampled_from(["0", "1", "2", "raise", "string"]), max_size=40),
    fatal=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["die", "die", "die", "hang"])), max_size=3),
    workers=st.integers(1, 3),
)
def test_invariants_of_the_pool(user_file, responses, fatal, workers):
    for at, kind in fatal:
        responses.insert(at, kind)
    with pool_of(user_file, workers=workers, time_limit_s=patience(0.2)) as pool:
        outcomes = pool.score(samples(*responses))
        pids = [child.process.pid for child in pool._children]
    assert [o.reward for o in outcomes] == [float(r) if r.isdigit() else None for r in responses]
    assert [o.error for o in outcomes] == [KINDS.get(r) for r in responses]
    assert all(gone(pid) for pid in pids)


def test_a_child_that_dies_idle_costs_nothing(user_file):
    with pool_of(user_file) as pool:
        pid = int(pool.score(samples("pid"))[0].reward or 0)
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert [o.reward for o in pool.score(samples("1", "2"))] == [1.0, 2.0]


def test_a_file_that_no_longer_loads_costs_samples_not_the_run(user_file):
    with pool_of(user_file) as pool:
        user_file.write_text("raise RuntimeError('edited')")
        outcomes = pool.score(samples("1", "die", "2", "3"))
        assert [o.error for o in outcomes] == [None, "died", "died", "died"]
        assert "edited" in outcomes[3].detail
        user_file.write_text(USER)
        assert pool.score(samples("4"))[0].reward == 4.0


def test_what_a_function_prints_is_on_the_standard_error(tmp_path, capfd):
    file = tmp_path / "prints.py"
    file.write_text(
        "def reward(prompt, response, answer):\n    print(response, flush=True)\n    return 1\nprint('loaded')"
    )
    with pool_of(file) as pool:
        pool.score(samples("scored"))
    out, err = capfd.readouterr()
    assert (out, err.split()) == ("", ["loaded", "scored"])


def test_fields_reach_the_function_that_names_them(user_file):
    row = RewardSample("p", "1", "a", {"bonus": 2, "other": "x", "answer": "the raw column", "prompt": ["chat"]})
    for function, expected in (("reward", 3.0), ("narrow", 2.0)):
        with pool_of(user_file, function) as pool:
            assert pool.score([row])[0].reward == expected


def test_children_stay_light(user_file):
    with pool_of(user_file) as pool:
        assert pool.score(samples("torch"))[0].reward == 0.0


def test_large_samples_do_not_deadlock(user_file):
    big = [RewardSample("p" * 300_000, "1", "a") for _ in range(32)]
    with pool_of(user_file, time_limit_s=patience(5.0)) as pool:
        assert [o.reward for o in pool.score(big)] == [1.0] * 32


def test_throughput_of_trivial_samples():
    with RewardPool(RewardConfig(workers=1)) as pool:
        rows = [RewardSample("1+1=", str(i % 10), "2") for i in range(512)]
        assert pool.score([]) == []
        times = []
        for _ in range(5):
            started = time.perf_counter()
            outcomes = pool.score(rows)
            times.append(time.perf_counter() - started)
    assert sum(o.reward or 0 for o in outcomes) == sum(i % 10 == 2 for i in range(512))
    # About 6 ms on an idle machine.
    assert within(min(times), 0.05)


def test_close_leaves_no_process(user_file):
    pool = pool_of(user_file, workers=2)
    pids = [child.process.pid for child in pool._children]
    pool.close()
    pool.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(samples("1"))


@pytest.mark.parametrize("workers", [1, 3])
def test_close_ends_a_call_of_another_thread_and_no_child_is_started_after_it(user_file, workers, caplog):
    pool, raised = pool_of(user_file, workers=workers, time_limit_s=600), []

    def score():
        with pytest.raises(RuntimeError, match="the reward pool is closed") as caught:
            pool.score(samples(*["hang"] * 9))
        raised.append(caught.value)

    thread = threading.Thread(target=score)
    thread.start()
    wait_for(lambda: all(child.pending for child in pool._children), 10)
    children = list(pool._children)
    started = time.monotonic()
    pool.close()
    assert within(time.monotonic() - started, 5)
    thread.join(patience(5))
    assert raised and not pool._children and not caplog.records, "no sample is reported as failed"
    assert all(gone(child.process.pid) for child in children)
    pool._fill()
    assert not pool._children


def test_what_a_function_started_ends_with_it(user_file):
    with pool_of(user_file) as pool:
        assert pool.score(samples("grandchild"))[0].error == "timeout"
    listed = subprocess.run(["pgrep", "-f", "sleep 599.25"], capture_output=True, text=True).stdout.split()
    assert all(gone(int(pid)) for pid in listed)


@pytest.mark.parametrize("response", ["1", "hang", "hang holding the interpreter"])
def test_children_end_when_the_parent_is_killed(user_file, response):
    script = (
        "import sys\nfrom fusion.rewards import *\n"
        f"pool = RewardPool(RewardConfig(path={f'{user_file}:reward'!r}, workers=2, time_limit_s=100))\n"
        "print(*[child.process.pid for child in pool._children], flush=True)\n"
        f"pool.score([RewardSample('', {response!r}, '')] * 2)\ninput()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    assert all(running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids)
    parent.communicate()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{file}", "expected file.py:function"),
        ("/nowhere/reward.py:f", "/nowhere/reward.py does not exist"),
        ("{file}:absent", r"defines no function 'absent'; it defines \['narrow', 'reward', 'two'\]"),
        ("{file}:two", r"takes \(prompt, response\), expected \(prompt, response, answer, \*\*fields\)"),
        ("{broken}:f", "importing it raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("{dying}:f", "its process exited with status 5 before it was ready"),
    ],
)
def test_errors_of_the_path_name_the_key(user_file, tmp_path, path, message):
    (broken := tmp_path / "broken.py").write_text("import no_such_module")
    (dying := tmp_path / "dying.py").write_text("import os; os._exit(5)")
    config = RewardConfig(path=path.format(file=user_file, broken=broken, dying=dying))
    with pytest.raises(ValueError, match=r"reward\.path=.*" + message):
        RewardPool(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "maths"}, "reward.name='maths': expected one of arithmetic, counting, math, custom"),
        ({"name": "custom"}, "expected file.py:function, as reward.name='custom'"),
        ({"time_limit_s": 0}, "reward.time_limit_s=0"),
        ({"time_limit_s": float("nan")}, "reward.time_limit_s=nan"),
        ({"workers": 0}, "reward.workers=0"),
        ({"memory_mib": 64}, "reward.memory_mib=64: expected a whole number in \\[128, .*, or null"),
        ({"memory_mib": 1024.0}, "reward.memory_mib=1024.0"),
        ({"max_failed_share": 1.5}, r"reward.max_failed_share=1.5: expected a number in \[0, 1\]"),
    ],
)
def test_config_errors_name_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**changes).validate()


@pytest.mark.extended
def test_a_file_that_loads_for_too_long_is_refused_with_the_place_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ndef wait():\n    time.sleep(1000)\nwait()\n")
    monkeypatch.setattr("fusion.rewards.process.START_LIMIT_S", patience(2.0))
    with pytest.raises(ValueError, match=r"(?s)reward\.path=.*slow\.py:reward': not ready after \d+ s.* in wait"):
        pool_of(tmp_path / "slow.py")


def test_metrics_of_nothing_scored_have_no_mean():
    figures = reward_metrics([None], ["timeout"])
    assert figures["reward/failed_timeout"] == figures["reward/failed"] == 1
    assert "critic/rewards/mean" not in figures and figures["reward/failed_share"] == 1
    assert "reward/failed_share" not in reward_metrics([], [])
