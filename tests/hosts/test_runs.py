"""Whole runs on several hosts: the same as on one, whatever the deployment; and over slow links, and on other hosts.

`python -m pytest -m slow -s tests/hosts` prints the figures of docs/figures.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import pytest
import torch

from tests import machine
from tests.colocate.cards import tiny_reward_model
from tests.hosts.cluster import Cluster
from tests.hosts.namespaces import ROOT, Hosts, why_not
from tests.stalesync.runs import SMALL, rows_of, train, weights_of
from tests.stalesync.test_stale_run import STALE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

FIGURES = "critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm"
EXACT = ["run.steps=3", "run.eval_prompts=0", "training.lr=1e-3", "algorithm.kl_coef=0.01", "fusion.checksum=true"]
TASK = [one for one in SMALL if one != "device=emulated"]
LAYOUTS = {"colocated": "tp2ep2_ep4", "full": "tp2ep2_ep2", "hybrid": "tp2ep2_ep2", "separate": "single"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared, base):
    with Hosts(2, shared.parent) as hosts:
        yield Cluster(hosts)


def _deployed(deployment, folder):
    options = [f"fusion={deployment}", f"parallel={LAYOUTS[deployment]}"]
    return options + ([f"reward.model={tiny_reward_model(folder / 'judge')}"] if deployment == "full" else [])


@pytest.mark.parametrize("deployment", LAYOUTS)
def test_a_run_on_two_hosts_is_bitwise_the_one_on_one(cluster, base, shared, deployment):
    options = [*EXACT, *_deployed(deployment, shared / deployment)]
    two = cluster.train(base, shared, f"run.name={deployment}-two", *options)
    assert two.returncode == 0, two.stdout + two.stderr
    for host in ("this host", "host-b (10.73.0.2)"):
        assert f"other users of {host} can change the files" in two.stderr, "Ray is in /tmp/ray, to which all may write"
    one = train(base, shared, f"run.name={deployment}-one", "cluster.npus=4", *options)
    assert one.returncode == 0, one.stdout + one.stderr
    folders = [shared / f"{deployment}-{count}" for count in ("one", "two")]
    for figure in FIGURES:
        of_one, of_two = ([row[figure] for row in rows_of(folder)] for folder in folders)
        assert len(of_one) == 3 and of_one == of_two, figure
    ours, theirs = (weights_of(folder / "hf") for folder in folders)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    logs = [(folders[1] / "logs" / f"rank-{rank}.log").read_text() for rank in range(4)]
    assert [log.split(" on ")[1].split()[0] for log in logs] == ["host-a", "host-a", "host-b", "host-b"]


@pytest.mark.parametrize("deployment", LAYOUTS)
def test_a_stale_run_on_two_hosts_keeps_the_bound_and_every_group_ends_once(cluster, base, shared, deployment):
    name, bound, steps = f"{deployment}-stale", 1, 5
    stale = [*STALE, f"stalesync.max_staleness={bound}", f"run.steps={steps}", "queue.durability=journal"]
    done = cluster.train(base, shared, f"run.name={name}", *stale, *_deployed(deployment, shared / f"{name}-role"))
    assert done.returncode == 0, done.stdout + done.stderr
    groups = [json.loads(line) for line in (shared / name / "groups.jsonl").read_text().splitlines()]
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps
    assert {row["ended"] for row in groups} == {"trained"} and max(row["lag"] for row in groups) <= bound
    assert rows_of(shared / name)[-1]["distqueue/rows"] == 0


def test_kv_travels_between_hosts_and_changes_no_sample(cluster, base, shared):
    """Chunks on four engines of two hosts, bit by bit the run without chunks and with nothing left in shared memory."""
    task = [
        "parallel=single",
        "run.steps=3",
        "run.eval_prompts=0",
        "training.lr=1e-3",
        "rollout.engine.batch_invariant=true",
    ]
    task += ["rollout.max_response_length=200", "rollout.sampling.forced_median=100"]
    pool = [
        "rollout.kv_pool.suspended=pool",
        "rollout.schedule.chunk_tokens=16",
        "rollout.kv_pool.pull_tokens=8",
        "rollout.kv_pool.spread=0",
    ]
    for name, options in (("kv-plain", []), ("kv-pooled", pool)):
        done = cluster.train(base, shared, f"run.name={name}", *task, *options)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, pooled = (rows_of(shared / name) for name in ("kv-plain", "kv-pooled"))
    for figure in FIGURES:
        assert [row.get(figure) for row in plain] == [row.get(figure) for row in pooled], figure
    ours, theirs = (weights_of(shared / name / "hf") for name in ("kv-plain", "kv-pooled"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    names = "hits", "pulls", "remote", "misses", "damaged"
    counts = {name: sum(row[f"rollout/kv_pool_{name}"] for row in pooled) for name in names}
    print(f"\nrequests continued behind KV: {counts}")
    assert counts["remote"] > 0 == counts["damaged"]
    for host in cluster.members:
        left = cluster.hosts.run(host, ["sh", "-c", "ls -d /dev/shm/distqueue-kv-* 2>/dev/null"]).stdout
        assert not left, f"{host}: {left}"


def test_a_slow_link_makes_a_run_slow_and_no_more(cluster, base, shared):
    seconds = {}
    for name, kbit_per_s in (("fast", None), ("slow", 4000)):
        if kbit_per_s:
            cluster.hosts.slow("host-b", kbit_per_s)
        try:
            done = cluster.train(base, shared, f"run.name={name}", *EXACT, "parallel=tp2ep2_ep4")
        finally:
            cluster.hosts.slow("host-b", 10_000_000)
        assert done.returncode == 0, done.stdout + done.stderr
        seconds[name] = sum(row["timing_s/step"] for row in rows_of(shared / name)[1:]) / 2
    print(f"\nseconds a step at full speed; with a link of 4 Mbit/s: {seconds['fast']:.2f}; {seconds['slow']:.2f}")
    assert seconds["slow"] > seconds["fast"]
    for figure in FIGURES:
        assert len({tuple(row[figure] for row in rows_of(shared / name)) for name in seconds}) == 1, figure


def _environment(folder):
    """What scripts/environment.sh takes for an active environment in which everything is installed."""
    folder.mkdir()
    key = hashlib.sha256((ROOT / "setup.py").read_bytes() + f"{ROOT} \n".encode()).hexdigest()[:16]
    (folder / f".rlfusion-{key}").touch()
    return str(folder)


def _recipe(hosts, shared, name, *arguments):
    active = _environment(shared / f"{name}-venv")
    ssh = hosts.ssh(shared / f"{name}-bin", VIRTUAL_ENV=active)
    path = f"{ssh}:{sys.prefix}/bin:{os.environ['PATH']}"
    environment = os.environ | {"VIRTUAL_ENV": active, "PATH": path, "PYTHONPATH": str(ROOT)}
    return machine.run(["bash", "recipes/several_hosts.sh", *arguments], 240, cwd=ROOT, env=environment)


@pytest.mark.parametrize("planned", [False, True])
def test_the_recipe_starts_ray_runs_the_job_and_leaves_nothing(base, shared, planned):
    """The second with a plan for a supernode of two hosts, on emulated cards."""
    name = f"recipe-{planned}"
    plan = ["model=qwen3_30b_a3b", "cluster=a3_16"] if planned else []
    axes = ("train.tp=2", "train.pp=1", "train.ep=2", "infer.tp=1", "infer.ep=4")
    layout = [f"parallel.{axis}" for axis in axes]
    cards = ["device.kind=emulated", "model.dtype=float32", "cluster.hardware=null", "cluster.npus=4", *layout]
    overrides = [f"model.path={base}", f"run.dir={shared}", f"run.name={name}", *TASK, *EXACT, *cards]
    with Hosts(2, shared.parent) as hosts:
        done = _recipe(hosts, shared, name, *plan, *hosts.names, "--", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "other users of " not in done.stderr, "Ray is in a private folder"
        left = [line for host in hosts.names for line in hosts.processes(host)]
        assert not left, left
        for host in hosts.names:
            listed = hosts.run(host, ["find", "/tmp", "-maxdepth", "1", "-name", "ray*"])
            assert listed.returncode == 0 and not listed.stdout, "Ray's folders"
    assert len(rows_of(shared / name)) == 3
    assert (shared / name / "logs" / "rank-3.log").read_text().split(" on ")[1].startswith("host-b")
    files = [
        path for path in (shared / name).rglob("*") if path.is_file() and path.suffix in (".log", ".yaml", ".json")
    ]
    assert files and not [path for path in files if "RAY_AUTH_TOKEN" in path.read_text()], "the token is in no file"


def test_the_recipe_names_the_host_on_which_ray_does_not_start(base, shared):
    with Hosts(2, shared.parent) as hosts:
        hosts.kill("host-b")
        done = _recipe(
            hosts, shared, "dead", *hosts.names, "--", f"model.path={base}", "data=addition", "cluster.npus=4"
        )
    assert done.returncode != 0 and "host-b" in done.stderr, done.stderr
