"""A launch reports what a user must know: a Ray that cannot be started or joined, and from which step a run resumes."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import ray

from distqueue import QueueClosed, StorageFull
from fusion.telemetry import RunFolder
from stalesync import launch
from stalesync.job import savepoint
from stalesync.job.config import Config, RunConfig
from stalesync.job.resume import Reopened, new_folder, reopen
from stalesync.process import failures
from stalesync.process.failures import ClusterOpen, QueueFailed, RayEnded, RayNotStarted
from stalesync.process.ray_cluster import has_token, keep_token, ray_cluster, token_file
from stalesync.process.run_log import Progress, RunLog
from tests.machine import run
from tests.stalesync.runs import train


@pytest.fixture(autouse=True)
def _environment():
    with mock.patch.dict(os.environ):
        yield


def test_a_ray_that_does_not_start_in_time_says_what_to_do(monkeypatch):
    ray.shutdown()  # that of other tests
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "0")
    with (
        pytest.raises(RayNotStarted, match="machine is busy.* RAY_raylet_start_wait_time_s=300 .* Timed out"),
        ray_cluster(None),
    ):
        raise AssertionError("it has started")
    assert not ray.is_initialized()


LATE = """
import ray

from stalesync.process.ray_cluster import ray_cluster

with ray_cluster(None):
    assert ray.is_initialized()
    print(ray.get_runtime_context().gcs_address, ray._raylet.get_authentication_mode())
    print(*(node["NodeManagerAddress"] for node in ray.nodes()))
"""


def test_a_ray_that_was_imported_first_starts_with_the_token_and_on_loopback():
    read_at_import = ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    environment = {name: value for name, value in os.environ.items() if name not in read_at_import}
    started = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    gcs, mode, node = started.stdout.split()
    assert gcs.startswith("127.0.0.1:") and mode == "1" and node == "127.0.0.1"


def test_a_cluster_that_cannot_be_joined_is_named_with_its_key():
    told = str(RayNotStarted("host:6379", ConnectionError("refused")))
    assert told.startswith("cluster.address=host:6379: could not join") and told.endswith("ConnectionError: refused")


@pytest.mark.parametrize(("resume", "steps_done"), [("true", 10), ("auto", 10), ("false", 0)])
def test_progress_begins_at_the_step_of_the_checkpoint(tmp_path, monkeypatch, resume, steps_done):
    class Shown(Exception):
        pass

    def show(total_steps, **options):
        raise Shown(total_steps, options["steps_done"])

    for step in (9, 10):
        checkpoint = RunFolder(tmp_path, "run", "resume").checkpoints / f"step-{step}"
        savepoint.begin(checkpoint, None)
        savepoint.finish(checkpoint, json.dumps({"step": step}))
    config = Config(run=RunConfig(dir=str(tmp_path), steps=12, resume=resume))
    monkeypatch.setattr(launch, "LiveView", show)
    earlier = reopen(config.run)
    with new_folder(config.run) if earlier is None else earlier.folder as folder, pytest.raises(Shown) as shown:
        launch.Launch(
            config=config,
            spec=None,
            source=None,
            rule=None,
            folder=folder,
            logs=RunLog(folder.path),
            progress=Progress(),
            report={},
            earlier=earlier or Reopened(folder),
        ).run()
    assert shown.value.args == (12, steps_done)


def test_shared_memory_or_a_disk_that_is_full_is_named_where_ray_ends(monkeypatch):
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    free = {"/dev/shm": 1 << 30, "/tmp": 1 << 30}
    monkeypatch.setattr(failures, "_free_bytes", free.__getitem__)
    assert "busy" in str(RayNotStarted(None, RuntimeError()))
    assert "(its exit status is unknown); its logs are in" in str(RayEnded("raylet"))
    free["/tmp"] = 4096
    assert "on this machine: the disk is full: /tmp: 4,096 bytes are free;" in str(RayNotStarted(None, RuntimeError()))
    free["/dev/shm"] = 0
    assert "(shared memory is full: /dev/shm: 0 bytes are free); its logs" in str(RayEnded("raylet"))
    free["/dev/shm"] = free["/tmp"] = 1 << 30
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert "(shared memory is mounted read-only: /dev/shm); its logs" in str(RayEnded("raylet"))


def test_a_queue_that_ends_while_it_starts_is_named():
    """As while the run trains: what is raised is then the queue's own error."""
    with pytest.raises(QueueFailed, match="the queue has failed: killed; with queue.durability=journal"):
        with failures.naming_queue(lambda: None):
            raise QueueClosed("killed")


def test_an_error_of_ray_is_one_line_without_the_stack_of_its_processes():
    stack = "System error: GCS is gone\n*** StackTrace Information ***\n/ray/_raylet.so(+0x12) [0x7f] ray::Do()\n" * 9
    for address in (None, "host:6379"):
        told = str(RayNotStarted(address, RuntimeError(stack)))
        assert told.endswith("Ray reports RuntimeError: System error: GCS is gone") and "\n" not in told
    assert len(str(RayNotStarted(None, RuntimeError("x" * 10**6)))) < 1000
    assert str(RayNotStarted(None, RuntimeError())).endswith("Ray reports RuntimeError:")


@pytest.mark.parametrize(
    ("environment", "has_file", "joined"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"RAY_AUTH_TOKEN": "abc"}, False, True),
        ({"RAY_AUTH_TOKEN_PATH": "/etc/token"}, False, True),
        ({"RAY_AUTH_MODE": "token"}, False, False),
        ({"RAY_AUTH_MODE": "disabled"}, False, True),
    ],
)
def test_a_cluster_is_joined_only_with_a_token_or_by_choice(tmp_path, environment, has_file, joined):
    if has_file:
        token_file(tmp_path).parent.mkdir()
        token_file(tmp_path).write_text("abc")
    assert has_token(environment, tmp_path) == joined


def test_a_cluster_without_a_token_is_refused_with_what_to_do(tmp_path, monkeypatch):
    ray.shutdown()
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterOpen, match="cluster.address=host:6379: .*ray get-auth-token --generate"):
        with ray_cluster("host:6379"):
            raise AssertionError("it has joined")


OPEN = """
import sys

from ray.cluster_utils import Cluster

print(Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}).address, flush=True)
sys.stdin.read()
"""

JOIN = """
import sys

from stalesync.process.failures import ClusterOpen
from stalesync.process.ray_cluster import ray_cluster

try:
    with ray_cluster(sys.argv[1]):
        print("joined")
except ClusterOpen as error:
    print(error)
"""


@pytest.mark.extended  # starts a cluster of its own
def test_a_cluster_that_accepts_callers_without_a_token_is_refused_unless_chosen(tmp_path):
    keep_token({}, tmp_path)
    plain = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | {"HOME": str(tmp_path)}
    unsafe = plain | {"RAY_AUTH_MODE": "disabled"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", OPEN], env=unsafe, **pipes) as head:
        address = head.stdout.readline().strip()
        for environment, outcome in ((plain, f"cluster.address={address}: there is no token"), (unsafe, "joined")):
            done = run([sys.executable, "-c", JOIN, address], 120, env=environment)
            assert done.stdout.startswith(outcome), (done.stdout, done.stderr)
        head.stdin.close()


def test_a_token_that_cannot_be_written_whole_does_not_appear(tmp_path, monkeypatch):
    def full(fd, mode):
        opened = mock.MagicMock()
        opened.__enter__.return_value.write.side_effect = OSError(28, "No space left on device")
        opened.__exit__.side_effect = lambda *_: os.close(fd)
        return opened

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fdopen", full)
        keep_token({}, tmp_path)
    assert not list(token_file(tmp_path).parent.iterdir())
    keep_token({}, tmp_path)
    assert len(token_file(tmp_path).read_text()) == 64


def test_a_token_is_readable_by_its_user_only_and_never_replaced(tmp_path):
    keep_token({"RAY_AUTH_TOKEN": "abc"}, tmp_path)
    assert not token_file(tmp_path).exists()
    keep_token({}, tmp_path)
    token = token_file(tmp_path).read_text()
    assert len(token) == 64 and token_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert list(token_file(tmp_path).parent.iterdir()) == [token_file(tmp_path)]
    token_file(tmp_path).chmod(0o644)  # as Ray leaves it
    keep_token({}, tmp_path)
    assert token_file(tmp_path).read_text() == token and token_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_queue_that_fails_where_storage_is_full_names_it(monkeypatch):
    full = StorageFull("shared memory is full: /dev/shm/distqueue-1/s: 0 bytes are free")
    with pytest.raises(QueueFailed, match=f"^the queue has failed: {full}$"), failures.naming_queue(lambda: None):
        raise full
    monkeypatch.setattr(failures, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(
        QueueFailed, match=r"^the queue has failed: killed \(shared memory is full: /dev/shm: [\d,]+ bytes"
    ):
        raise QueueFailed("killed")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.path={folder}/broken.py:score"], "raised RuntimeError: no such judge"),
        (["reward.path={folder}/mine.py:score"], "it returned {'points': 1} (dict); expected a finite number"),
        (["reward.path={folder}/broken.py:score", "device.capacity_bytes=1M"], "memory: train takes "),
        (["device.kind=npu"], "device.kind=npu: torch_npu is not installed; Ascend cards need CANN"),
    ],
)
def test_a_start_that_fails_keeps_no_name(base, tmp_path, overrides, message):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such judge')")
    (tmp_path / "mine.py").write_text("def score(prompt, response, answer): return {'points': 1}")
    done = train(base, tmp_path / "runs", *[one.format(folder=tmp_path) for one in overrides])
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").iterdir()]
