"""`python -m distqueue`: a journal's folder, a queue by name, the list of them, and names that nobody has."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.util import get_node_ip_address

from distqueue import DistQueue
from distqueue.core import QueueCore
from distqueue.inspection import main, ray_heads
from distqueue.journal import INDEX, Journal
from distqueue.samples import SampleTable
from tests import machine
from tests.distqueue.core.cores import ask, new_core, put_of, select, store
from tests.distqueue.faults import make_batch
from tests.warm import use_ray

Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """(exit code, what is printed, what is complained about)."""

    def show(*arguments: str) -> tuple[int, str, str]:
        return main(arguments), *capsys.readouterr()

    return show


def leave_a_journal(folder: Path) -> None:
    """Of three samples, one of them acknowledged, one without a reward."""
    core = new_core("reward", "train")
    journal = Journal(folder, core.snapshot)
    journal.begin(core.snapshot())
    core.record = journal.append
    store(core, put_of({"a": 3, "b": 4, "c": 5}), time.time())
    store(core, put_of({"a": 1, "b": 1}, "reward"))
    assert ask(core, select(1))
    core.ack("train", ["a"], 0.0)
    core.drop(["c"], "stale", 0.0)
    core.seal(0.0)
    asyncio.run(journal.flushed())
    journal.close()


def test_a_journal_is_shown_as_it_would_be_gone_on_with(tmp_path: Path, shown: Shown) -> None:
    folder = tmp_path / "what? 100% #1"
    leave_a_journal(folder)
    before = (folder / INDEX).read_bytes()
    code, text, complaint = shown(str(folder))
    lines = text.splitlines()
    assert (code, complaint) == (0, "")
    assert re.fullmatch(rf"queue: 2 samples, 200 B, journal {re.escape(str(folder))}, sealed", lines[0])
    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.startswith(("reward ", "train "))}
    assert rows == {"reward": ["2", "0"], "train": ["1", "0"]}, "what was leased is open"
    assert "ended: 1 dropped:stale" in lines and "column tokens: int8 (L)" in lines
    assert (folder / INDEX).read_bytes() == before, "it only reads"


def test_a_reader_that_has_ended_is_no_failure(tmp_path: Path) -> None:
    leave_a_journal(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        command = [sys.executable, "-m", "distqueue", str(tmp_path)]
        done = machine.run(command, 60, stdout=closed)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_journal_that_a_queue_has_open_is_shown(tmp_path: Path, shown: Shown) -> None:
    core = QueueCore(SampleTable(["train"], 1.0))
    journal = Journal(tmp_path, core.snapshot)
    assert shown(str(tmp_path))[0::2] == (1, f"journal {tmp_path}: it holds no state yet\n")
    journal.begin(core.snapshot())
    assert shown(str(tmp_path))[1].startswith("queue: 0 samples, 0 B, journal")
    journal.close()


@pytest.fixture(scope="module")
def queue() -> Iterator[DistQueue]:
    use_ray()
    queue = DistQueue.create(["reward", "train"], name="samples")
    queue.put(make_batch(["a", "b"]))
    yield queue
    queue.close()


def test_a_live_queue_is_shown_by_its_name(queue: DistQueue, shown: Shown) -> None:
    waiting = queue._actor.get.remote(selection=select(3, "train", ["tokens", "advantage"]), wait_s=60.0, turn=None)
    while not queue.state()["waiting"]:
        assert not ray.wait([waiting], timeout=0.05)[0]
    code, text, _ = shown("samples")
    lines = text.splitlines()
    assert code == 0 and lines[0].startswith("queue samples: 2 samples, ") and lines[0].endswith("in memory")
    waits = next(line for line in lines if line.startswith("1 reader is waiting, "))
    assert waits.endswith("task 'train' requests 3 samples with ['tokens', 'advantage']: 0 samples ready, "
                          "column 'advantage' missing for 2")  # fmt: skip
    assert any(line.startswith("shard-") for line in lines)
    ray.cancel(waiting)


def test_live_queues_are_listed(queue: DistQueue, shown: Shown) -> None:
    assert shown() == (0, "live queues:\n  samples\n", "")


def test_a_name_that_nobody_has_is_told_with_those_that_are_there(queue: DistQueue, shown: Shown) -> None:
    code, text, complaint = shown("sample")
    assert (code, text) == (1, "")
    assert complaint == "queue 'sample': not in this Ray cluster; live queues: 'samples'\n"
    with pytest.raises(ValueError, match="queue 'sample': not in this Ray cluster; live queues: 'samples'"):
        DistQueue.connect("sample")
    with pytest.raises(ValueError, match="name='samples': a queue of this name exists in this Ray cluster"):
        DistQueue.create(["train"], name="samples")


def test_as_a_command(queue: DistQueue, tmp_path: Path) -> None:
    leave_a_journal(tmp_path / "journal")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "distqueue", *arguments]
        return machine.run(command, timeout_s=60)

    assert run(str(tmp_path / "journal")).stdout.startswith("queue: 2 samples")
    address = f"{get_node_ip_address()}:{ray.get_runtime_context().gcs_address.rsplit(':')[1]}"
    assert address in ray_heads()
    unknown = run("nobody", "--address", address)
    assert unknown.returncode == 1 and unknown.stderr.splitlines()[-1].startswith("queue 'nobody': not in this Ray")


def test_the_heads_on_a_machine_are_found_with_their_ports(tmp_path: Path) -> None:
    def process(number: int, *command: str) -> None:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_text("\0".join(command) + "\0")

    for number, host in enumerate(["127.0.0.1", "127.0.0.1", "10.0.0.7"]):
        (tmp_path / f"gcs_server_port_n{number}").write_text(f"{5000 + number}")
        options = [f"--session-dir={tmp_path}", f"--node-id=n{number}", f"--node-ip-address={host}", "--log_dir"]
        process(number, "/ray/core/src/ray/gcs/gcs_server", *options)
    process(7, "/ray/core/src/ray/gcs/gcs_server", f"--session-dir={tmp_path}", "--node-id=new", "--node-ip-address=1")
    process(8, "python", "--node-ip-address=10.0.0.9")
    process(9, "")
    assert ray_heads(tmp_path) == ["10.0.0.7:5002", "127.0.0.1:5000", "127.0.0.1:5001"]
    assert ray_heads(tmp_path / "nothing") == []
