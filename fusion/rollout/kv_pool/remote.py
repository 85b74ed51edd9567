"""Fetch KV from the pools of other machines of the run.

    rank of engine B ─ NAME, at most so long ─► server of machine A: opens the file, takes it out of the pool
        header and checksum verified,  ◄─ its bytes ─┘              how they travel: `Peer`, e.g. as a Ray object
        copied to pinned memory

A reader asks with the name of a file, a digest of run, host, request, policy version, tokens and shard, as it would on
the machine itself; it verifies what arrives in the same way (`header.py`), and uses it once. Each rank has at most one
file under way: its own memory for it, and one copy on the machine that serves it, which the reader frees. Whether to
ask, and for how long to wait, is decided in `pull.py`."""

import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distqueue.payload.sweep import NodeProcess, memory
from fusion.inference.pooled import FoundKV, KVKey, KVPeers, KVSource
from fusion.rollout.kv_pool.folder import FILES, folder_of, is_private, open_file
from fusion.rollout.kv_pool.header import FileNames, PooledFile
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.pull import PullPlan

log = logging.getLogger(__name__)

NAME = re.compile(r"[0-9a-f]{40}")


class PeerLate(RuntimeError):
    """A machine has not answered in time."""


class PeerGone(RuntimeError):
    """A machine does not answer any more, or cannot."""


class Peer(Protocol):
    """A way to the pool of another machine."""

    @property
    def machine(self) -> str:
        """Name of the machine."""

    @property
    def boot(self) -> str:
        """The boot of its host, which is part of the names of its files."""

    def take(self, name: str, timeout_s: float) -> memoryview | None:
        """Take a file out of the pool of the machine, and return its bytes; None: there is none. They are freed with
        the last reference to them.
        Raise PeerLate: it takes longer than ``timeout_s``.
        Raise PeerGone: the machine, or the process that serves its files, has ended."""


class KVServer:
    """Serve the files that the ranks of this machine have parked."""

    def __init__(self, spec: KVPoolSpec, root: Path | None = None):
        self._boot = NodeProcess.of(os.getpid()).boot
        roots = [root or memory()] + ([] if spec.spill is None else [Path(spec.spill)])
        self._folders = [folder_of(folder, spec.run, self._boot) / FILES for folder in roots]

    def boot(self) -> str:
        """Return the boot of this host, which is part of the names of its files."""
        return self._boot

    def take(self, name: str) -> np.ndarray | None:
        """Remove a file and return its bytes, uint8; None: there is none, or it is not this user's own.
        Raise ValueError: it is not the name of a file of the pool."""
        if not NAME.fullmatch(name):
            raise ValueError(f"name={name!r:.100}: expected 40 hexadecimal digits")
        for folder in self._folders:
            try:
                file = open_file(folder / name)
            except OSError:  # also: a link
                continue
            with file:
                about = os.fstat(file.fileno())
                if not is_private(about):
                    continue
                (folder / name).unlink(missing_ok=True)
                content, size = np.empty(about.st_size, np.uint8), 0
                while count := file.readinto(content[size:].data):
                    size += count
                return content[:size]
        return None


class ReceivedBytes(io.RawIOBase):
    """The bytes of a file of another machine, as a file; they are freed when it is closed."""

    def __init__(self, content: memoryview):
        self._left = content

    def readinto(self, part: Any) -> int:
        count = min(len(part), self._left.nbytes)
        part[:count], self._left = self._left[:count], self._left[count:]
        return count

    def close(self) -> None:
        self._left = memoryview(b"")
        super().close()


class RemotePool(KVSource):
    """The pool of another machine, as one rank sees it."""

    def __init__(self, peer: Peer, run: str, plan: PullPlan, clock: Callable[[], float] = time.monotonic):
        self._peer, self._plan, self._clock = peer, plan, clock
        self._names = FileNames(run, peer.boot)

    def find(self, key: KVKey) -> FoundKV | None:
        """Fetch the file of this rank's part, unless computing the KV again is faster."""
        tokens = key.num_tokens - 1
        patience_s = self._plan.patience_s(self._peer.machine, tokens)
        if not patience_s:
            return None
        began, name = self._clock(), self._names.file(key)
        try:
            content = self._peer.take(name, patience_s)
        except PeerLate:
            self._plan.observe_late(self._peer.machine, tokens, self._clock() - began)
            return None
        except PeerGone as error:
            log.warning("KV of another machine is computed again from now on: %s", str(error))
            self._plan.observe_gone(self._peer.machine)
            return None
        if content is None:
            return None
        self._plan.observe_pulled(self._peer.machine, tokens, self._clock() - began)
        return PooledFile(ReceivedBytes(content), content.nbytes, key=key, name=name)


class RemotePools(KVPeers):
    """The pools of all other machines.
    ``peers_by_engine``: the machines of each engine, by the engine's number in the run, without this machine."""

    def __init__(self, run: str, peers_by_engine: Mapping[int, Sequence[Peer]]):
        self._plan = PullPlan()
        self._pools = {
            engine: [RemotePool(peer, run, self._plan) for peer in peers] for engine, peers in peers_by_engine.items()
        }

    def of(self, engine: int) -> Sequence[KVSource]:
        """Return the pools of the machines of an engine."""
        return self._pools.get(engine, ())

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self._plan.observe_prefill(tokens, seconds)
