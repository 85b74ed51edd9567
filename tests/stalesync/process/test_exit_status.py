"""The exit status of a process that is not waited for."""

import os
import subprocess
import sys
from contextlib import closing

import pytest

from stalesync.process.process_ends import ExitStatus
from tests.machine import running, wait_for


@pytest.mark.parametrize(("end", "status"), [("os._exit(0)", 0), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_the_status_of_a_zombie_is_read_and_of_a_reaped_process_where_the_kernel_keeps_it(end, status):
    command = [sys.executable, "-c", f"import os, sys; sys.stdin.read(); {end}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        with closing(ExitStatus(process.pid)) as found:
            assert found.read() is None, "it runs"
            process.stdin.close()
            wait_for(lambda: not running(process.pid), 30)
            assert found.read() == status
            assert process.wait() == status
            kept = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
            assert found.read() == (status if kept else None)
    finally:
        process.kill()
