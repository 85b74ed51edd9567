"""recipes/slurm.sh with an srun, a scontrol and a Ray that only record what they were asked to do."""

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.machine import communicate, run, wait_for

ROOT = Path(__file__).resolve().parents[2]
JOB = ["run.name=one", "model.path=m", "data.source=d.jsonl", "cluster.npus=8"]

TOOLS = {
    "scontrol": 'printf "%s\\n" node1 node2 node3',
    "srun": 'echo "srun $*" >> "$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "getent": "echo '10.0.0.1  STREAM node1'",
    "ray": """
trap 'echo "ray stopped" >> "$LOG"; exit 0' TERM
echo "folder $(stat -c %a "$RAY_TMPDIR") $RAY_TMPDIR" >> "$LOG"
[ -s "$RAY_AUTH_TOKEN_PATH" ] && echo "token $(stat -c %a "$RAY_AUTH_TOKEN_PATH")" >> "$LOG"
while true; do sleep 0.05; done""",
    "python": """
if [ "$1" = - ]; then # waits until Ray runs on all nodes
  until [ "$(grep -c ^token "$LOG")" = 3 ]; do sleep 0.05; done
  exit "${RAY_STATUS:-0}"
fi
trap 'echo "run stopped" >> "$LOG"; exit 143' TERM
echo "training" >> "$LOG"
[ -n "${RUN_STATUS:-}" ] && exit "$RUN_STATUS"
while true; do sleep 0.05; done""",
}


@pytest.fixture
def job(tmp_path):
    """Environment of the job's script: the tools come first in PATH, and a checkout needs no installation."""
    tools, checkout = tmp_path / "bin", tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    (checkout / "scripts/environment.sh").touch()
    tools.mkdir()
    for name, body in TOOLS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(stat.S_IRWXU)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_SUBMIT_DIR": str(checkout)}
    path = f"{tools}:{os.environ['PATH']}"
    return os.environ | slurm | {"PATH": path, "LOG": str(tmp_path / "log"), "SLURM_NTASKS": "3"}


def script(*arguments):
    return ["bash", str(ROOT / "recipes/slurm.sh"), *arguments]


def lines_of(job):
    log = Path(job["LOG"])
    return log.read_text().splitlines() if log.exists() else []


def has_ended(job):
    """Ray has stopped on all nodes, and the token and Ray's folder, in which only its user could write, are gone."""
    (folder,) = {line for line in lines_of(job) if line.startswith("folder ")}
    assert folder.startswith("folder 700 /tmp/ray-") and not Path(folder.split()[2]).exists()
    return lines_of(job).count("ray stopped") == 3 and not list(Path(job["SLURM_SUBMIT_DIR"]).glob(".ray-token*"))


def test_ray_starts_on_every_node_and_the_run_on_the_first(job):
    done = run(script(*JOB), 30, env=job | {"RUN_STATUS": "0"})
    assert done.returncode == 0, done.stderr
    starts = [line for line in lines_of(job) if "ray start" in line]
    assert sorted(line.split("--nodelist=")[1].split()[0] for line in starts) == ["node1", "node2", "node3"]
    (head,) = [line for line in starts if "--head" in line]
    assert "--nodelist=node1 " in head and "--node-ip-address=10.0.0.1" in head
    assert all("--address=10.0.0.1:20077" in line for line in starts if line != head)
    (training,) = [line for line in lines_of(job) if "scripts/train.py" in line]
    assert "--nodelist=node1 " in training and training.endswith(f"run.save_every=10min {' '.join(JOB)}")
    assert "token 600" in lines_of(job), "a file that only its user can read"
    assert has_ended(job)


def test_a_signal_before_the_time_limit_ends_the_run_in_order_and_then_ray(job):
    with subprocess.Popen(script(*JOB), env=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: "training" in lines_of(job), 30)
        process.send_signal(signal.SIGTERM)
        _, err = communicate(process, 30)
    assert process.returncode == 143, err
    lines = lines_of(job)
    assert lines.index("run stopped") < lines.index("ray stopped") and has_ended(job)


@pytest.mark.parametrize("which", ["RUN_STATUS", "RAY_STATUS"])
def test_a_failure_is_the_exit_status_of_the_job(job, which):
    done = run(script(*JOB), 30, env=job | {which: "3"})
    assert done.returncode == 3, done.stderr
    assert ("training" in lines_of(job)) == (which == "RUN_STATUS")
    assert has_ended(job)


@pytest.mark.parametrize(
    ("change", "arguments", "error"),
    [
        ({"SLURM_JOB_ID": ""}, JOB, "not a Slurm job"),
        ({}, JOB[:1], "model.path=FOLDER is missing"),
        ({}, JOB[1:], "run.name=NAME is missing"),
        ({}, [*JOB[:2], "data.rows=4"], "data.source=FILE is missing"),
        ({"SLURM_NTASKS": "6"}, JOB, "6 tasks on 3 nodes: expected --ntasks-per-node=1"),
        ({"SLURM_SUBMIT_DIR": "/"}, JOB, "/ is not the checkout"),
    ],
)
def test_what_cannot_work_is_refused_before_ray_starts(job, change, arguments, error):
    done = run(script(*arguments), 30, env=job | change)
    assert done.returncode == 2 and error in done.stderr
    assert not lines_of(job)
