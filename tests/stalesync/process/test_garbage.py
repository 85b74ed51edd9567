"""The threads of a process share arenas, what is excluded from collections, and what Ray's processes get."""

import os
import subprocess
import sys

import pytest

from stalesync.process.garbage import ARENAS, NUM_COLLECTIVES
from stalesync.process.ray_cluster import bounding_memory
from tests.machine import patience, run

THREADS = """
import ctypes, re, sys, threading
from stalesync.process.garbage import share_arenas
if "share" in sys.argv:
    share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = open(sys.argv[1], "wb+")
stream = ctypes.c_void_p(libc.fdopen(file.fileno(), b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
print(len(re.findall("<heap nr=", open(sys.argv[1]).read())))
"""


def num_arenas(tmp_path, *words):
    command = [sys.executable, "-c", THREADS, str(tmp_path / "info"), *words]
    inherited = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run(command, text=True, capture_output=True, timeout=patience(30), check=True, env=inherited)
    return int(done.stdout)


def test_threads_share_arenas(tmp_path):
    assert num_arenas(tmp_path, "share") <= ARENAS < num_arenas(tmp_path)


COLLECTIVES = """
import json, os, sys, tempfile
import torch, torch.distributed as dist
from stalesync.process.garbage import keep_few_collectives
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"
keep_few_collectives()
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
for _ in range(150):
    dist.all_reduce(torch.zeros(1))
print(len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]))
"""


@pytest.mark.extended
def test_few_collectives_are_recorded_unless_the_user_wants_more():
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_FR_BUFFER_SIZE"}
    done = run([sys.executable, "-c", COLLECTIVES], 60, env=environment)
    assert done.stdout == f"{NUM_COLLECTIVES}\n7\n", done.stderr


EXCLUDED = """
import gc
from stalesync.process.garbage import collecting_seldom
with collecting_seldom(1):
    print(gc.get_freeze_count() > 1000)
print(gc.get_freeze_count())
gc.freeze()
with collecting_seldom(1):
    pass
print(gc.get_freeze_count() > 1000)
"""


def test_what_was_excluded_from_collections_before_stays_so():
    done = run([sys.executable, "-c", EXCLUDED], 30)
    assert done.stdout.split() == ["True", "0", "True"], done.stdout + done.stderr


def test_processes_of_ray_share_arenas_and_keep_no_record_of_calls(monkeypatch):
    monkeypatch.setattr("os.environ", environment := {"MALLOC_ARENA_MAX": "7"})
    with bounding_memory():
        assert environment == {"MALLOC_ARENA_MAX": "7", "RAY_task_events_report_interval_ms": "0"}, "the user's setting"
    assert environment == {"MALLOC_ARENA_MAX": "7"}, "nothing is left to processes that start later"
    environment.clear()
    with bounding_memory():
        assert environment["MALLOC_ARENA_MAX"] == str(ARENAS)
