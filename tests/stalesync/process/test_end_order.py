"""The kernel keeps the order in which a process of Ray and the thread that started it have ended."""

import os
import signal
import subprocess
import sys

import pytest

from tests.machine import communicate, running, wait_for

WATCHER = """
import os, sys
from stalesync.process.process_ends import EndWatch

order, raylet = EndWatch(), os.pidfd_open(int(sys.argv[1]))
names = {order.thread: "thread", raylet: "raylet"}
order.watch([raylet])
print("watches", flush=True)
sys.stdin.readline()
seen = []
while len(seen) < 2:
    seen += [names[fd] for fd in order.poll(10)]
print(*seen, flush=True)
"""

STARTER = """
import ctypes, signal, subprocess, sys, threading, time

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
raylet = subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent)
print(raylet.pid, flush=True)
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(raylet.pid)])
if sys.argv[2] == "first thread":
    threading.Thread(target=time.sleep, args=(600,)).start()
    signal.sigwait([signal.SIGTERM])
    ctypes.CDLL(None).pthread_exit(None)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "order"), [("raylet", "raylet thread"), ("starter", "thread raylet"), ("first thread", "thread raylet")]
)
def test_a_process_that_dies_with_the_thread_that_started_it_comes_behind_the_thread(how, order):
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    starter = subprocess.Popen([sys.executable, "-c", STARTER, WATCHER, how], **pipes, text=True)
    raylet = int(starter.stdout.readline())
    assert starter.stdout.readline() == "watches\n"
    if how == "raylet":
        os.kill(raylet, signal.SIGKILL)
        wait_for(lambda: not running(raylet), 30)
    starter.send_signal(signal.SIGTERM if how == "first thread" else signal.SIGKILL)
    wait_for(lambda: not running(raylet), 30)
    if how == "first thread":
        assert starter.poll() is None, "another thread lives on"
    starter.stdin.write("\n")  # only now it looks
    starter.stdin.flush()
    assert starter.stdout.readline() == f"{order}\n"
    starter.kill()
    communicate(starter, 30)
