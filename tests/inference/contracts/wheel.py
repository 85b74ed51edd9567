"""Read files of the wheels on PyPI that pip chooses without downloading these whole: by HTTP range requests."""

from __future__ import annotations

import io
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable

PLATFORMS = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28)]
OF_A_WHEEL = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--ignore-installed", *PLATFORMS]
TRUSTED = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
READ_AHEAD_BYTES = 1 << 20


def chosen(requirement: str) -> tuple[str, str]:
    """Return the version and the address of the wheel that pip would install, without downloading it."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--report=-", *OF_A_WHEEL]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*pip, f"--target={folder}", requirement], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = json.loads(done.stdout)["install"]
    return wheel["metadata"]["version"], wheel["download_info"]["url"]


def reader(*urls: str) -> Callable[[str], str | None]:
    """Return what reads a source file by its path, from the first of these wheels that has it."""
    archives = [zipfile.ZipFile(io.BufferedReader(RemoteFile(url), READ_AHEAD_BYTES)) for url in urls]

    def read(path: str) -> str | None:
        archive = next((one for one in archives if path in one.NameToInfo), None)
        return None if archive is None else archive.read(path).decode()

    return read


class RemoteFile(io.RawIOBase):
    """A file of a server that answers range requests."""

    def __init__(self, url: str):
        self.url, self.at = url, 0
        with self._request(0, 0) as answer:
            self.size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _request(self, first: int, last: int):
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-{last}"})
        return urllib.request.urlopen(request, context=TRUSTED, timeout=60)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer) -> int:
        length = min(len(buffer), self.size - self.at)
        if length <= 0:
            return 0
        with self._request(self.at, self.at + length - 1) as answer:
            buffer[:length] = answer.read()
        self.at += length
        return length
