"""Write, find and remove the files of one rank in the KV pool of its machine, as `pool.py` plans.

    park ─► memory: /dev/shm ─ over the limit ─► disk: rollout.kv_pool.spill       folder.py: both, and their owners
                    │                                │
    find ◄──────────┴────────────────────────────────┘  first in memory: a file is on disk before it leaves it

A reader opens a file without following links, and verifies owner, mode, header and checksum before any byte of the copy
that it has read is used. The name of a file is a digest that includes the run and the boot of the host, so KV of
another host is not found on a shared disk."""

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from distqueue.errors import FULL, StorageFull
from distqueue.payload.sweep import NodeProcess, memory
from fusion.inference.pooled import FoundKV, KVDamaged, KVKey, KVPeers, KVStore
from fusion.rollout.kv_pool.folder import PoolFolder, folder_of, is_private
from fusion.rollout.kv_pool.header import FileNames, Header, PooledFile, bytes_of, payload_sum
from fusion.rollout.kv_pool.pool import Command, KVPoolSpec, Place, PoolPlan, Remove, Spill, Write

MIN_FREE = 0.5
"""Share of the file system in memory that the pool leaves free: the queue's segments are there, too"""

MAX_IDLE_BYTES = 256 << 20
"""Files in memory that a rank keeps to write into again; at most an eighth of its limit"""

MAX_TRIES = 3
"""Places that are tried for a file: memory, memory after others were moved or evicted, disk"""

log = logging.getLogger(__name__)


class KVFiles(KVStore):
    """The files of one rank. `park` and `find` may be called in any thread, the rest in one.
    ``root``: shared memory.
    ``peers``: the pools of other machines; None: KV does not travel between machines.
    Raise StorageFull: there is no space for its folders."""

    def __init__(self, spec: KVPoolSpec, rank: int, root: Path | None = None, peers: KVPeers | None = None):
        boot, limit = NodeProcess.of(os.getpid()).boot, spec.max_memory_bytes
        idle_bytes = MAX_IDLE_BYTES if limit is None else min(MAX_IDLE_BYTES, limit // 8)
        folder = folder_of(root or memory(), spec.run, boot)
        in_memory = PoolFolder(folder, rank, min_free=MIN_FREE, max_idle_bytes=idle_bytes)
        self._folders: dict[Place, PoolFolder] = {"memory": in_memory}
        if spec.spill is not None:
            self._folders["disk"] = PoolFolder(folder_of(Path(spec.spill), spec.run, boot), rank)
        for opened in self._folders.values():
            if opened.replaces:
                _remove_files_of(rank, opened)
        self._rank, self._file_names = rank, FileNames(spec.run, boot)
        self._plan = PoolPlan(limit, spec.max_disk_bytes if spec.spill is not None else 0)
        self._names: dict[str, str] = {}
        """Request, or prefix of a shared prompt → name of the file that this rank has written; `_computed`: and the
        tokens of which it has KV"""
        self._computed: dict[str, int] = {}
        self._warned = False
        self._lock = threading.RLock()
        """Held where the plan is changed and carried out, not where KV is written"""
        self.writer = ThreadPoolExecutor(1, "kv-writer")
        self.peers, self.takes_suspended, self.evictions = peers, spec.takes_suspended, 0

    @property
    def nbytes(self) -> int:
        return self._plan.held["memory"]

    def computed(self, id: str) -> int:
        return self._computed.get(id, 0)

    def park(
        self, key: KVKey, *, computed: int, kv: torch.Tensor, routing: torch.Tensor | None, charged_bytes: int
    ) -> bool:
        id, name = key.request or key.prefix, self._file_names.file(key)
        parts = [bytes_of(part) for part in (kv, routing) if part is not None]
        header = Header(
            rank=self._rank,
            name=name,
            computed=computed,
            kv_bytes=kv.numel() * kv.itemsize,
            routing=() if routing is None else (*routing.shape, routing.itemsize),
            sum=payload_sum(parts),
        )
        content = [memoryview(header.encode()), *parts]
        full: OSError | None = None
        for _ in range(MAX_TRIES):
            place = self._execute(partial(self._plan.park, id, charged_bytes))
            if place is None:
                break
            try:
                self._folders[place].write(name, content, fresh=not key.request)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                full = error
                with self._lock:
                    self._plan.observe_full(id)
                continue
            with self._lock:
                if self._plan.place_of(id) == place:
                    self._names[id], self._computed[id] = name, computed
                    return True
                self._plan.observe_gone(id)  # its room was needed while it was written
                self._folders[place].remove(name)
                return False
        with self._lock:
            self._count_full(charged_bytes, full)
        return False

    def __contains__(self, key: KVKey) -> bool:
        name = self._file_names.file(key)
        return any(name in folder for folder in self._folders.values())

    def find(self, key: KVKey) -> FoundKV | None:
        """Open a file in memory, else on disk: its writer moves it there before it removes it here."""
        name = self._file_names.file(key)
        for folder in self._folders.values():
            try:
                file = folder.open(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise KVDamaged(str(error)) from None
            about = os.fstat(file.fileno())
            if not is_private(about):
                file.close()
                raise KVDamaged(f"it belongs to user {about.st_uid}, with mode {stat.filemode(about.st_mode)}")
            return PooledFile(file, about.st_size, key=key, name=name, own=self._names.get(key.request) == name)
        return None

    def discard(self, key: KVKey) -> None:
        name = self._file_names.file(key)
        for folder in self._folders.values():
            folder.take(name)

    def forget(self, ids: Iterable[str]) -> None:
        self._execute(lambda: self._plan.forget(ids))

    def clear(self) -> None:
        self._execute(self._plan.clear)

    def close(self) -> None:
        """Remove this rank's files, and the folders if no other rank is in them."""
        self.writer.shutdown(cancel_futures=True)
        self.clear()
        for folder in self._folders.values():
            folder.close()
        self._folders = {}

    def _execute(self, plan: Callable[[], list[Command]]) -> Place | None:
        """Move and remove files as planned; return where a new one goes, None: nowhere."""
        with self._lock:
            for command in plan():
                match command:
                    case Write(_, place):
                        return place  # the last command
                    case Spill(id) if id in self._names:  # else it is being written
                        self._spill(id)
                    case Remove(id, place, evicted) if id in self._names:  # else so it is, or it was lost on its way
                        self._lose(id, self._folders[place])
                        self.evictions += evicted
        return None

    def _lose(self, id: str, folder: PoolFolder) -> None:
        del self._computed[id]
        folder.remove(self._names.pop(id))

    def _spill(self, id: str) -> None:
        """Move a file to disk. If another engine has taken it, nothing is left to move."""
        name, source, content = self._names[id], self._folders["memory"], b""
        try:
            content = source.read(name)
            self._folders["disk"].write(name, [memoryview(content)])
            source.remove(name)
        except FileNotFoundError:
            self._plan.observe_gone(id)
            self._lose(id, source)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._plan.observe_full(id)
            self._lose(id, source)
            self._count_full(len(content), error)

    def _count_full(self, nbytes: int, error: OSError | None) -> None:
        """Count KV for which there is no space, and warn once."""
        self.evictions += 1
        if not self._warned:
            self._warned = True
            log.warning(
                "rollout.kv_pool.suspended=pool: no space for %s bytes of KV%s: such requests are computed again; "
                "enlarge /dev/shm (docker run --shm-size), raise rollout.kv_pool.max_parked_mib, or set "
                "rollout.kv_pool.spill",
                f"{nbytes:,}",
                f" ({error})" if error else "",
            )


def _remove_files_of(rank: int, folder: PoolFolder) -> None:
    """Remove what an earlier process of this rank has written, which no other process does before the run ends."""
    for name in folder.names():
        with suppress(OSError, KVDamaged):  # another rank has taken it, or it is damaged
            with folder.open(name) as file:
                header, _ = Header.read(file)
            if header.rank == rank:
                folder.remove(name)


def open_files(spec: KVPoolSpec, rank: int, peers: KVPeers | None = None) -> KVFiles | None:
    """Open a rank's files in the pool; None, with a warning, if there is no space for its folders."""
    try:
        return KVFiles(spec, rank, peers=peers)
    except StorageFull as error:
        log.warning("rollout.kv_pool.suspended=pool: %s: this card's KV is computed again", str(error))
        return None
