"""What benchmarks/chaos.py plans and how it judges; a short run of it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry.manifest import write_manifest
from fusion.telemetry.row_digests import RowDigests, rewind
from stalesync.process.stopping import COMPLETED
from tests import machine
from tests.chaos.chain import is_temporary, overrides_of, read_rows
from tests.chaos.flips import Flip, strike, with_dropped
from tests.chaos.plan import (
    AFTER_SAVE,
    BEFORE_SAVE,
    BOUNDS,
    DEPLOYMENTS,
    ENDS,
    LOGS,
    SELDOM,
    STEPS,
    Kill,
    plan_chain,
)
from tests.chaos.space import Space, victim_of
from tests.chaos.verdict import Ended, Remains, differences, has_failed_rewards, judge

ROOT = Path(__file__).resolve().parents[2]


@given(seed=st.integers(0, 99), index=st.integers(0, 500))
def test_a_plan_depends_on_seed_and_number_and_its_kills_are_in_order(seed, index):
    chain = plan_chain(seed, index)
    assert chain == plan_chain(seed, index)
    *ended, last = chain.starts
    assert all([kill.ends for kill in kills] == [False] * (len(kills) - 1) + [True] for kills in ended)
    assert not any(kill.ends for kill in last)
    steps = [kill.step for kills in chain.starts for kill in kills if kill.step is not None]
    assert steps == sorted(steps) and all(1 <= step <= STEPS for step in steps)
    for kill in (kill for kills in chain.starts for kill in kills):
        assert kill.victim in (ENDS if kill.ends else {"shard", "reward", "queue", LOGS})
        if kill.victim == LOGS:
            assert (chain.save_every, chain.durability) == (f"{SELDOM}", "memory")
            assert (kill.step - AFTER_SAVE) // SELDOM == (kill.step + BEFORE_SAVE - 1) // SELDOM, (
                "no checkpoint meanwhile"
            )
        assert (kill.victim == "queue") <= (kill.ends == (chain.durability == "memory"))


def test_checkpoints_are_far_where_the_disk_is_to_be_full_between_them():
    for chain in (plan_chain(0, index) for index in range(60)):
        settings = dict(word.split("=", 1) for word in overrides_of(chain, model=ROOT, runs=ROOT))
        if any(kill.victim == LOGS for kills in chain.starts for kill in kills):
            assert settings["run.save_every"] == f"{SELDOM}" == settings.get("eval.every", f"{SELDOM}")


@given(seed=st.integers(0, 99), round=st.integers(0, 9))
def test_every_deployment_runs_once_a_round_at_each_bound(seed, round):
    count = len(DEPLOYMENTS) * len(BOUNDS)
    cases = [(chain.deployment, chain.bound) for chain in (plan_chain(seed, round * count + n) for n in range(count))]
    assert len({*cases}) == count


def test_a_hundred_chains_kill_everything_there_is():
    kills = [kill for index in range(100) for kills in plan_chain(0, index).starts for kill in kills]
    assert {kill.victim for kill in kills} == {*ENDS, "shard", "reward", LOGS}
    assert {kill.signal for kill in kills if kill.victim == "controller"} == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert any(kill.step is None for kill in kills)


@pytest.mark.parametrize(
    ("command", "victim"),
    [
        ("ray::Card.train", "worker"),
        ("ray::Shard", "shard"),
        ("ray::QueueActor.get", "queue"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=/x/raylet", "raylet"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/x", "gcs"),
        ("/usr/bin/python -c import json, sys from fusion.rewards.child import main", "reward"),
        ("/usr/bin/python -u /x/ray/dashboard/agent.py --raylet-name=/x/sockets/raylet ", None),
        ("ray::IDLE", None),
        ("", None),
    ],
)
def test_a_process_is_recognised_by_its_command_line(command, victim):
    assert victim_of(command) == victim


def test_temporary_files_are_told_from_complete_ones():
    assert all(map(is_temporary, (".metrics.jsonl.0123456789abcdef", "trainer.partial", "hf.old")))
    assert not any(map(is_temporary, ("metrics.jsonl", "step-4", "hf", "step-4.damaged")))


def _kill(victim, **changes):
    return replace(Kill(victim, "SIGKILL", step=4, delay_s=0.1, pick=0.5, ends=True), **changes)


def _ended(victim, status, err="", out="", **changes):
    kill = {name: changes.pop(name) for name in ("signal", "step", "ends") if name in changes}
    return Ended(_kill(victim, **kill), launched=True, status=status, out=out, err=err, **changes)


DIED = "error: rank 1 died in stage 'train' (killed, out of host memory, or crashed)\nevery rank's log: run.log\n"


FULL_CHECKPOINT = "the disk is full: /r/checkpoints/step-6.partial/1: 4,096 bytes were asked for, 0 are free"
FULL_WEIGHTS = "[Errno 28] No space left on device (9 bytes to write, 0 bytes are free): '/r/checkpoints/step-6/0'"


@pytest.mark.parametrize(
    "ended",
    [
        _ended("controller", -9),
        _ended("controller", 143, out="stopped by SIGTERM", signal="SIGTERM"),
        _ended("controller", 130, out="stopped by Ctrl-C", signal="SIGINT"),
        replace(_ended("controller", -15, signal="SIGTERM"), launched=False),
        replace(_ended("controller", 143, "stopped by SIGTERM", signal="SIGTERM"), launched=False),
        _ended("worker", 1, DIED, rank=1),
        _ended("worker", 1, DIED),
        _ended("queue", 1, "error: the queue has failed: its actor has ended"),
        _ended("raylet", 1, "error: Ray's process raylet has ended (killed)"),
        _ended("gcs", 1, "error: Ray did not start on this machine. If", step=None),
        _ended("gcs", -9, "error: Ray's process gcs_server has ended (killed)", step=None),
        _ended("disk", 1, "Traceback\nOSError: [Errno 28] No space left on device: 'metrics.jsonl'", signal=""),
        _ended("shard", 0, ends=False),
        _ended(LOGS, 0, "[Errno 28] No space left: '/r/metrics.jsonl': the run continues, the", signal="", ends=False),
        _ended("worker", 0),  # it came too late
        _ended("controller", 0, signal="SIGINT", rows=STEPS),
        _ended("controller", 0, signal="SIGTERM", rows=STEPS),
        _ended("controller", 0, out=f"Notes\n  {COMPLETED}\n", signal="SIGTERM", rows=STEPS - 1),
        _ended(LOGS, 1, f"error: the controller failed in stage 'save': StorageFull: {FULL_CHECKPOINT}", ends=False),
        _ended(LOGS, 1, f"error: rank 0 failed in stage 'save': OSError: {FULL_WEIGHTS}", ends=False),
    ],
)
def test_an_end_that_is_named(ended):
    assert ended.unnamed == ""


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (_ended("worker", 1, DIED, rank=0), "rank 1 is named instead of 0"),
        (_ended("worker", 1, "error: the queue has failed: x"), "worker is not named"),
        (_ended("worker", None), "it did not end"),
        (_ended("gcs", 1, "error: Ray did not start on this machine. If"), "gcs is not named"),
        (_ended("raylet", -6, "aborted"), "exit status -6, not 1"),
        (_ended("raylet", -9, "error: Ray's process raylet has ended (killed)"), "exit status -9, not 1"),
        (_ended("controller", -15, "*** SIGTERM received", signal="SIGTERM"), "exit status -15, not 143"),
        (_ended("controller", 143, signal="SIGTERM"), "the report does not say 'stopped by SIGTERM'"),
        (
            replace(_ended("controller", 143, signal="SIGTERM"), launched=False),
            "the standard error does not say 'stopped by SIGTERM'",
        ),
        (_ended("controller", 0, signal="SIGINT", rows=STEPS - 1), "SIGINT was ignored"),
        (_ended("controller", 0, signal="SIGTERM", rows=STEPS - 1), "SIGTERM was ignored"),
        (_ended("controller", 0, out=COMPLETED, signal="SIGTERM", rows=STEPS - 3), "SIGTERM was ignored"),
        (_ended("controller", 0, out=COMPLETED, signal="SIGINT", rows=STEPS - 1), "SIGINT was ignored"),
        (_ended("disk", 1, "error: rank 1 died in stage 'save'", signal=""), "disk is not named"),
        (
            _ended("disk", 1, "[Errno 28] No space left on device: 'a': the run continues", signal=""),
            "disk is not named",
        ),
        (_ended(LOGS, 0, "step 4", signal="", ends=False), "logs are not named"),
        (
            _ended(LOGS, 1, "error: the queue has failed: the disk is full: /r/queue/1", ends=False),
            "it ended, exit status 1",
        ),
        (
            _ended(LOGS, 1, "error: the controller failed in stage 'save': OSError: /r/checkpoints/step-6", ends=False),
            "it ended, exit status 1",
        ),
        (
            _ended("shard", 1, f"error: the controller failed in stage 'save': {FULL_CHECKPOINT}", ends=False),
            "it ended, exit status 1",
        ),
        (_ended("shard", 1, "error: the queue has failed: x", ends=False), "it ended, exit status 1"),
    ],
)
def test_an_end_that_is_not_named(ended, why):
    assert ended.unnamed == why


def test_an_end_is_late_by_its_own_limit_and_its_message_is_the_error():
    assert _ended("worker", 1, seconds=3.0, limit_s=2.0).late and not _ended("worker", 1, seconds=1.0, limit_s=2.0).late
    assert not _ended("shared memory", 0, seconds=3.0, limit_s=2.0).late, "it did not need any"
    assert _ended("worker", 1, "INFO\n" + DIED).message == DIED.splitlines()[0]
    assert _ended("controller", 143, out="run stopped by SIGTERM at step 3").message == "stopped by SIGTERM"
    assert _ended("controller", -9).message == "exit status -9"


def _trained(*groups, lag=0):
    return [{"step": 1, "group": group, "ended": "trained", "lag": lag} for group in groups]


REMAINS = Remains(
    steps=2,
    bound=1,
    metrics=[{"step": 1}, {"step": 2}],
    groups=[*_trained("e0-1", "e0-2"), {"step": 2, "group": "e0-3", "ended": "failed:reward_died"}],
    drawn=4,
    in_progress=["e0-4"],
)


def test_a_run_in_which_everything_is_there_once_has_no_fault():
    verdict = judge(REMAINS)
    assert (verdict.lost, verdict.twice, verdict.too_old) == ([], [], [])


@pytest.mark.parametrize(
    ("changes", "fault", "line"),
    [
        ({"drawn": 5}, "lost", "1 of 5 groups have no end and are not in progress"),
        ({"in_progress": []}, "lost", "1 of 4 groups have no end and are not in progress"),
        ({"metrics": [{"step": 2}]}, "lost", "step 1 has no metrics"),
        (
            {"groups": [*REMAINS.groups[:2], {"step": 2, "group": "e0-3", "ended": "failed:lost"}]},
            "lost",
            "group e0-3: failed:lost",
        ),
        ({"groups": [*REMAINS.groups, *_trained("e0-1")]}, "twice", "group e0-1 has ended 2 times"),
        ({"in_progress": ["e0-1", "e0-4"]}, "twice", "group e0-1 has ended and is in progress"),
        ({"drawn": 3}, "twice", "1 groups more than the 3 that were drawn"),
        ({"metrics": [{"step": 1}, {"step": 2}, {"step": 2}]}, "twice", "step 2 has 2 rows of metrics"),
        (
            {"groups": [*_trained("e0-1", lag=2), *REMAINS.groups[1:]]},
            "too_old",
            "group e0-1 was trained at an age of 2",
        ),
    ],
)
def test_what_is_lost_trained_twice_or_too_old_is_found(changes, fault, line):
    verdict = judge(replace(REMAINS, **changes))
    assert getattr(verdict, fault) == [line]
    assert not any(getattr(verdict, other) for other in {"lost", "twice", "too_old"} - {fault})


def test_remains_are_read_from_the_state_of_the_last_checkpoint():
    state = {
        "prompts": {"epoch": 2, "rows": 100, "position": 7, "skipped": 1},
        "ledger": {"in_flight": {"e2-1": 3}, "finished": {"e2-2": 3}},
    }
    remains = Remains.of_state(state, steps=2, bound=1, metrics=[], groups=[])
    assert remains.drawn == 206 and remains.in_progress == ["e2-1", "e2-2"]


def test_two_runs_are_compared_without_what_depends_on_their_starts():
    metrics = [{"step": 1, "actor/loss": 0.5, "timing_s/step": 1.0}, {"step": 2, "actor/loss": 0.25}]
    weights = {"model.safetensors": "ab"}
    assert not differences([metrics[0] | {"timing_s/step": 2.0}, metrics[1]], weights, of_metrics=metrics,
                           of_weights=weights)  # fmt: skip
    changed = [metrics[0], metrics[1] | {"actor/loss": 0.25000001}]
    assert differences(changed, weights, of_metrics=metrics, of_weights=weights) == [
        "step 2: actor/loss 0.25000001, not 0.25"
    ]
    assert differences(metrics[:1], weights, of_metrics=metrics, of_weights=weights) == ["1 steps instead of 2"]
    assert differences(metrics, {"model.safetensors": "cd"}, of_metrics=metrics, of_weights=weights) == [
        "final weights: model.safetensors"
    ]


def test_a_step_in_which_an_engine_was_replaced_is_compared_without_what_engines_count():
    theirs = [{"step": 1, "actor/loss": 0.5, "rollout/generated_tokens": 10.0}]
    ours = [{"step": 1, "actor/loss": 0.5, "rollout/generated_tokens": 14.0, "rollout/engine_restarts": 1.0}]
    assert not differences(ours, {}, of_metrics=theirs, of_weights={})
    (line,) = differences([ours[0] | {"actor/loss": 0.25}], {}, of_metrics=theirs, of_weights={})
    assert line == "step 1: actor/loss 0.25, not 0.5"
    del ours[0]["rollout/engine_restarts"]
    assert differences(ours, {}, of_metrics=theirs, of_weights={})


def test_a_worker_that_is_replaced_is_named_in_the_output_of_a_run_that_goes_on():
    kill = Kill("worker", "SIGKILL", 3, 0.1, 0.5, ends=True)
    died = "rank 1 died in stage 'generate' (killed); it had no unfinished requests, and engine 0 is started again"
    named = Ended(kill, launched=True, status=0, out=f"x\n{died}\n", rank=1, mended=True)
    assert not named.unnamed and named.message == "mended: the engine is replaced"
    assert replace(named, rank=0).unnamed == "rank 0 is not named"
    assert replace(named, status=None).unnamed == "it did not end"


def test_a_reward_that_was_killed_while_it_scored_is_seen():
    assert has_failed_rewards([{"step": 1}, {"step": 2, "reward/failed": 1.0}])
    assert not has_failed_rewards([{"step": 1, "reward/failed": 0.0}])


def test_a_file_beside_the_checkpoint_is_damaged_and_what_a_resume_says_of_it_is_judged(tmp_path):
    step = tmp_path / "checkpoints" / "step-2"
    step.mkdir(parents=True)
    rows = [{"step": number, "group": f"e0-{number}"} for number in range(1, 5)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    whole, digests = b"".join(lines[:3]), RowDigests(1)
    digests.add(lines[:3])
    write_manifest(step, {}, {"metrics.jsonl": digests.sealed()})
    for random in map(Random, range(20)):
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
        (tmp_path / "groups.jsonl").write_bytes(b"not sealed")
        flip = strike(tmp_path, random)
        data = (tmp_path / "metrics.jsonl").read_bytes()
        assert flip == Flip("metrics.jsonl", whole) and data[: len(whole)] != whole
        num_cut, line = rewind(tmp_path / "metrics.jsonl", 2, digests.sealed())
        dropped, kept = flip.dropped_rows(line), read_rows(tmp_path / "metrics.jsonl")
        assert with_dropped(kept, dropped, "step") == rows[:3] and len(dropped) + len(kept) == 3
        assert flip.dropped_rows("samples.jsonl: damaged rows were dropped (1)") is None
    assert with_dropped(rows, [{"step": 2, "group": "e0-2", "old": 1}], "group") == rows, "trained again"
    assert Flip("loggers.json", b"{").dropped_rows("loggers.json is damaged (ValueError): loggers") == []
    assert Flip("timeline.json", b"{").dropped_rows("") == []


@pytest.fixture
def space(tmp_path):
    try:
        space = Space(tmp_path / "space")
    except PermissionError as error:
        pytest.skip(str(error))
    yield space
    space.close()


def test_a_space_has_its_own_memory_and_disk_which_can_be_full_and_finds_its_processes(space):
    here = [*space.enter, "--", sys.executable, "-c"]
    write = "import sys; open(sys.argv[1], 'wb').write(bytes(1 << 16))"
    segment, file = "/dev/shm/segment", str(space.runs / "file")
    subprocess.run([*here, write, segment], check=True)
    assert space.left_files() == ["dev/shm/segment"] and not os.path.exists(segment)
    for what, path in (("disk", file), ("shared memory", segment + "2")):
        space.fill(what)
        full = subprocess.run([*here, write, path], capture_output=True, text=True)
        assert "No space left on device" in full.stderr
        space.free(what)
        subprocess.run([*here, write, path], check=True)
    sleep = "import os, time; os.setsid(); print(flush=True); time.sleep(600)"
    with subprocess.Popen([*here, sleep], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (command,) = space.commands().values()
        assert [*space.commands()] == [process.pid] and "time.sleep(600)" in command
        space.clear(space.commands())
    assert space.commands() == {} and space.left_files() == []


@pytest.mark.slow
def test_runs_that_are_killed_lose_nothing_and_leave_nothing(space, tmp_path):
    path = tmp_path / "chaos.json"
    command = [sys.executable, "benchmarks/chaos.py", "--seed", "1", "--kills", "8", "--jobs", "1", "--json", str(path)]
    done = machine.run(command, 600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(path.read_text())["figures"]["kills"] >= 8
