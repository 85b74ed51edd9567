"""Read the exit status of a process that is no child of this one: of a zombie, or from Linux 6.15 on of any that ended
while it was watched."""

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

INFO = struct.Struct("=Q52xi")
"""`struct pidfd_info` of `linux/pidfd.h`: its mask, and the exit status"""
PIDFD_GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3


class ProcessStat(NamedTuple):
    """What the kernel says of a process: `/proc/PID/stat`. ``name``: at most 15 bytes; ``started``: clock ticks since
    the machine started; ``exit_status``: of a zombie, as `waitpid` returns it."""

    name: str
    state: str
    parent: int
    started: int
    exit_status: int

    @classmethod
    def of(cls, pid: int) -> "ProcessStat | None":
        """Read that of a process; None: it has ended."""
        try:
            before, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)
        except OSError:
            return None
        fields = after.split()
        return cls(before.split("(", 1)[1], fields[0], int(fields[1]), int(fields[19]), int(fields[-1]))

    @classmethod
    def of_all(cls) -> "dict[int, ProcessStat]":
        found = {int(name): cls.of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
        return {pid: stat for pid, stat in found.items() if stat is not None}


class ExitStatus:
    """Watches a process of the same user. ``descriptor``: readable when it has ended; -1: there is none."""

    def __init__(self, pid: int) -> None:
        self._pid, self.descriptor = pid, -1
        with suppress(OSError, AttributeError):  # it has ended, or kernel or interpreter are older than Linux 5.3
            self.descriptor = os.pidfd_open(pid)

    def read(self) -> int | None:
        """Return the exit status, negative for a signal; None: it has not ended, or the kernel does not keep it."""
        status = self._of_reaped()
        if status is None:
            stat = ProcessStat.of(self._pid)
            if stat is not None and stat.state == "Z":
                status = stat.exit_status
            else:  # it may have been reaped in between
                status = self._of_reaped()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def _of_reaped(self) -> int | None:
        if self.descriptor >= 0:
            with suppress(OSError):  # an older kernel
                mask, status = INFO.unpack(fcntl.ioctl(self.descriptor, PIDFD_GET_INFO, INFO.pack(PIDFD_INFO_EXIT, 0)))
                if mask & PIDFD_INFO_EXIT:
                    return int(status)
        return None
