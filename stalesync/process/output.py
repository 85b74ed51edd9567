"""Keep a run going when the reader of its output has ended, as in `train | head`: its folder has what it prints."""

import io
import os
import stat
import sys
from typing import Any


class _OutlivingFile(io.FileIO):
    """A file whose reader may end: what is written afterwards is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlive_readers() -> None:
    """Let what is printed to a pipe or a socket without a reader be lost, instead of raising BrokenPipeError (rich: an
    exit without a word)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:  # closed, or replaced
            continue
        mode = os.fstat(stream.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            stream.flush()
            raw = _OutlivingFile(stream.fileno(), "w", closefd=False)
            lines = stream.line_buffering
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, None, lines))
