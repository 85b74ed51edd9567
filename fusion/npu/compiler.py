"""Compile a C++ library on first use, into the user's cache folder.

    sources + compiler flags + what else it depends on ──hash──► ~/.cache/rlfusion/<kind>-<hash>/<name>.so

Concurrent processes wait for one of them to build it (by a file lock), and an atomic rename publishes the complete
file. The units of a library are compiled in parallel. Imports neither torch nor anything else that is slow."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class BuildError(RuntimeError):
    """Raised when a library cannot be built; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Library:
    """What a library is built from.
    ``kind``: beginning of its folder's name.
    ``name``: of the file, without `.so`.
    ``units``: source text by name of each file that is compiled for itself.
    ``flags``: of the compiler; `links`: of the linker; `includes`: folders of included files.
    ``key``: everything that the result depends on, the units and flags apart: contents of included files, versions. Not
        where they lie, so that all checkouts of one version share the library."""

    kind: str
    name: str
    units: Mapping[str, str]
    flags: Sequence[str] = ()
    includes: Sequence[Path] = ()
    links: Sequence[str] = ()
    key: Sequence[bytes] = ()

    @property
    def path(self) -> Path:
        """Path of the library once it is built."""
        digest = hashlib.sha256(platform.machine().encode())
        for part in (*self.key, *(text.encode() for text in (*self.units.values(), *self.flags))):
            digest.update(part + b"\0")
        return cache_folder() / f"{self.kind}-{digest.hexdigest()[:16]}" / f"{self.name}.so"


def cache_folder() -> Path:
    """Return the folder of built libraries: `$XDG_CACHE_HOME/rlfusion` or `~/.cache/rlfusion`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "rlfusion"


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def build(library: Library) -> Path:
    """Build the library if needed and return its path.
    Raise BuildError: there is no compiler, it failed, or the cache folder cannot be written."""
    target = library.path
    if target.exists():
        return target
    try:
        return _build(library, target)
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be written: {error}") from None


def _build(library: Library, target: Path) -> Path:
    gxx = compiler()
    if gxx is None:
        raise BuildError("no C++ compiler found (install g++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                os.replace(_compile(gxx, library, Path(folder)), target)
    return target


def _compile(gxx: str, library: Library, folder: Path) -> Path:
    compilers, objects = [], []
    for name, text in library.units.items():
        source = folder / f"{name}.cpp"
        source.write_text(text)
        objects.append(f"{source}.o")
        includes = (f"-I{path}" for path in library.includes)
        command = [gxx, "-c", *library.flags, *includes, str(source), "-o", objects[-1]]
        compilers.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        for process in compilers:
            _finish(process)
    finally:
        for process in compilers:
            process.kill()
    target = folder / f"{library.name}.so"
    _finish(
        subprocess.Popen(
            [gxx, "-shared", *objects, "-o", str(target), *library.links], stderr=subprocess.PIPE, text=True
        )
    )
    return target


def _finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    if process.returncode != 0:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
        raise BuildError(f"the C++ compiler failed: {first}")
