"""Read the exit status of a process that is no child of this one: of a zombie, or from Linux 6.15 on of any that ended
while it was watched."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

INFO = struct.Struct("=Q52xi")
"""`struct pidfd_info` of `linux/pidfd.h`: its mask, and the exit status"""
PIDFD_GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3


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
            status = self._of_zombie()
        if status is None:  # reaped in between
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

    def _of_zombie(self) -> int | None:
        with suppress(OSError):  # it was reaped
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z":
                return int(fields[-1])
        return None
