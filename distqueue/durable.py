"""What survives a power loss: the content of a file once it was synced, its name once its folder was."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Returns when a file's content, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: str | Path) -> Path:
    """Returns when the folder is there and its name, with those of the parents that were made for it, on disk."""
    folder = Path(folder).absolute()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in dict.fromkeys([*made, folder]):  # its own also if it was there: who made it may have died before
        sync(path.parent)
    return folder
