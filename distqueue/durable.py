"""Writes that survive a power loss: a file's content is durable once synced, its name once its folder is."""

import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: str | Path) -> Path:
    """Create a folder and its parents, for this user alone; returns when the names of all of them are on disk."""
    folder = Path(folder).absolute()
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(created):
        path.mkdir(mode=0o700, exist_ok=True)
    for path in dict.fromkeys([*created, folder]):  # also if it existed: its creator may have died before the sync
        sync(path.parent)
    return folder
