"""Hosts that cannot train together are refused before anything starts; one that is lost ends the run by its name."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from tests import machine
from tests.hosts.cluster import HEAD, Cluster
from tests.hosts.namespaces import Hosts, why_not
from tests.machine import within
from tests.stalesync.runs import rows_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

FOUR = "parallel=tp2ep2_ep4"


@pytest.fixture
def hosts(tmp_path):
    with Hosts(4, tmp_path.parent) as made:
        yield made


def _lose(run, folder, lose):
    """Loses a host in the middle of a run; returns the seconds to its end, and what it wrote to stderr."""
    metrics = folder / "metrics.jsonl"
    wait_until(run, 180, lambda: metrics.exists() and len(rows_of(folder)) >= 3)
    lose()
    began = time.monotonic()
    _, err = machine.communicate(run, 150)
    return time.monotonic() - began, err


def _assert_names_host_b(run, folder, err):
    assert run.returncode == 1, err
    named = re.search(r"rank [23](?: and rank 3)? on host-b \(10\.73\.0\.2\).*", err)
    assert named and re.search(r"in stage '\w+'|^stage '\w+'|stage '\w+'", err), err
    record = json.loads((folder / "error.json").read_text())
    assert record["rank"] in (2, 3) and record["host"] == "host-b (10.73.0.2)" and record["stage"], record


@pytest.mark.parametrize("deployment", ["colocated", "separate"])
def test_a_host_that_is_killed_is_named_and_the_run_resumes_on_other_hosts_in_another_layout(
    hosts, base, tmp_path, deployment
):
    cluster, folder = Cluster(hosts, ["host-a", "host-b"]), tmp_path / "run"
    layout = FOUR if deployment == "colocated" else "parallel=single"
    common = [f"fusion={deployment}", "run.eval_prompts=0", "queue.durability=journal"]
    run = cluster.begin(base, tmp_path, *common, layout, "run.steps=1000", "run.save_every=1")
    took_s, err = _lose(run, folder, lambda: hosts.kill("host-b"))
    print(f"\n{deployment}: seconds from the end of a host to the end of the run: {took_s:.1f}")
    _assert_names_host_b(run, folder, err)
    assert within(took_s, 30)
    assert hosts.run("host-a", ["ray", "stop"], timeout_s=60).returncode == 0
    machine.wait_for(lambda: not hosts.processes("host-a"), 20)
    steps = max(row["step"] for row in rows_of(folder)) + 2
    others = Cluster(hosts, ["host-c", "host-d"])
    resumed = [*common, "parallel=tp2ep2_ep2", f"run.steps={steps}", "run.resume=true", "fusion=hybrid"]
    done = others.train(base, tmp_path, *(one for one in resumed if one != f"fusion={deployment}"))
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stdout + done.stderr
    assert [row["step"] for row in rows_of(folder)] == list(range(1, steps + 1))
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps, "none lost, none twice"
    assert (folder / "logs" / "rank-3.log").read_text().rsplit(" on ", 1)[1].startswith("host-d")


def test_a_host_whose_link_is_cut_is_named(hosts, base, tmp_path):
    cluster, folder = Cluster(hosts, ["host-a", "host-b"]), tmp_path / "run"
    run = cluster.begin(base, tmp_path, FOUR, "run.eval_prompts=0", "run.steps=1000")
    took_s, err = _lose(run, folder, lambda: hosts.cut("host-b"))
    print(f"\nseconds from a cut link to the end of the run: {took_s:.1f}")
    _assert_names_host_b(run, folder, err)
    assert within(took_s, 120)


def test_a_cut_link_ends_the_stage_at_its_timeout_if_that_is_sooner(hosts, base, tmp_path):
    cluster, folder = Cluster(hosts, ["host-a", "host-b"]), tmp_path / "run"
    limit_s = round(machine.patience(20))
    run = cluster.begin(
        base, tmp_path, FOUR, "run.eval_prompts=0", "run.steps=1000", f"cluster.stage_timeout_s={limit_s}"
    )
    _, err = _lose(run, folder, lambda: hosts.cut("host-b"))
    assert run.returncode == 1 and "on host-b (10.73.0.2)" in err, err


def test_hosts_that_share_no_disk_or_model_are_refused_by_name_before_anything_starts(base, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    with Hosts(2, tmp_path.parent, own=(tmp_path / "runs",)) as hosts:
        done = Cluster(hosts).train(base, tmp_path / "runs", FOUR, "run.steps=2")
        assert (
            done.returncode == 1 and f"run.dir: {tmp_path / 'runs' / 'run'} on host-b (10.73.0.2) is not" in done.stderr
        )
        assert "model.path" not in done.stderr.split("error: ")[1] and "failed: 0 steps" in done.stdout
        seen = hosts.run("host-b", ["find", str(tmp_path / "runs"), "-mindepth", "1"])
        assert not seen.stdout, "nothing was written to the other disk"
    with Hosts(2, tmp_path.parent, own=(model,)) as hosts:
        for name in ("host-a", "host-b"):
            hosts.run(name, ["sh", "-c", f"cp {base}/* {model}/"])
        hosts.run("host-b", ["sh", "-c", f"printf x >> {model}/config.json; rm {model}/tokenizer.json"])
        done = Cluster(hosts).train(model, tmp_path / "shared", FOUR, "run.steps=2")
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"model.path={model}: host-b (10.73.0.2): its folder has other contents" in done.stderr
        assert "config.json, tokenizer.json" in done.stderr and "run.dir:" not in done.stderr


def test_a_head_that_no_other_host_reaches_and_wrong_tokens_are_refused_with_what_to_do(hosts, base, tmp_path):
    cluster = Cluster(hosts, ["host-a", "host-b"], start=False)
    done = cluster.start_ray("host-a", HEAD)  # as Debian's /etc/hosts has it: its name is 127.0.1.1
    assert done.returncode == 0 and "127.0.1.1" in done.stdout + done.stderr
    assert cluster.start_ray("host-b", ["--address=10.73.0.1:6379"]).returncode == 0
    began = time.monotonic()
    done = cluster.train(base, tmp_path, FOUR)
    assert done.returncode == 1 and "host-a (127.0.1.1) can be reached by no other host" in done.stderr, done.stderr
    assert "--node-ip-address" in done.stderr and within(time.monotonic() - began, 40)
    for token, words in (("b" * 64, "refuses the token of this process. On every host"), (None, "ray get-auth-token")):
        cluster.token = {"RAY_AUTH_MODE": "token"} | ({"RAY_AUTH_TOKEN": token} if token else {})
        done = cluster.train(base, tmp_path, FOUR)
        assert done.returncode == 1 and words in done.stderr and "cluster.address=auto" in done.stderr, done.stderr
    refused = cluster.start_ray("host-c", ["--address=10.73.0.1:6379"])
    assert refused.returncode != 0 and "no authentication token was found" in refused.stderr
