"""Compare the files that the hosts of a run see: the run's folder, the models, the code. Imports neither torch nor ray.

    controller   puts a mark with a random name into the run's folder
    every host   looks for the mark, writes beside it, and reads its own models and code  ─► HostReport
    controller   compares the reports with its own                                        ─► a line for each difference

The run's folder must be one and the same; of models and code, copies will do. Digests are of the whole of small files,
and of three pieces of large ones: other weights of the same shape differ everywhere."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import xxhash

from stalesync.process.hosts import Host, describe_hosts
from stalesync.process.ray_folder import exposed

PACKAGES = ("distqueue", "fusion", "stalesync")
SOURCES = frozenset((".py", ".yaml", ".cpp", ".h"))
VERSIONS = ("torch", "ray", "safetensors")
"""Distributions whose versions must be equal on all hosts"""
CODE = "code"
"""Key of the project's own files in a report"""
PIECE_BYTES = 64 << 10
CHUNK_BYTES = 8 << 20
WHOLE_BYTES = 1 << 20
"""Files of at most this size are read whole"""
MAX_NAMED = 3
"""Number of differing files in a message"""
Digests = Mapping[str, str]
"""Digest of a file by its name"""


@dataclass(frozen=True)
class HostReport:
    """What one host sees. ``sees_folder``: whether the controller's mark is in its run folder; ``write_error``: why it
    cannot write there; "": it can; ``files``: of each model's folder, by the config key and value; of `CODE`; None:
    there is no such folder; ``exposed``: how other users can change the files of its Ray; "": in no way."""

    sees_folder: bool
    write_error: str
    files: Mapping[str, Digests | None]
    exposed: str = ""


def report_files(mark: str, folders: Mapping[str, str], ray_session: str | None = None) -> HostReport:
    """Report what this host sees. ``mark``: path of the controller's mark; ``folders``: paths of the models, by what to
    call them in a message; relative ones as this process resolves them; ``ray_session``: the folder of this host's Ray.
    Raise OSError if a file of a model, or of the code, cannot be read."""
    sees_folder, write_error = os.path.exists(mark), ""
    if sees_folder:
        own = f"{mark}-{os.urandom(4).hex()}"
        try:
            os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            os.unlink(own)
        except OSError as error:
            write_error = f"{error.strerror} (user {os.getuid()})"
    files: dict[str, Digests | None] = {name: digests_of(Path(path)) for name, path in folders.items()}
    how = exposed(Path(ray_session)) if ray_session is not None else ""
    return HostReport(sees_folder, write_error, files | {CODE: code_digests()}, how)


def find_differences(folder: str, own: HostReport, reports: Mapping[Host, HostReport]) -> list[str]:
    """Return a line for each thing that hosts lack or have otherwise than the controller; [] if all agree. ``folder``:
    the run's; ``own``: the controller's report."""
    lines = []
    if apart := [host for host, report in reports.items() if not report.sees_folder]:
        lines.append(
            f"run.dir: {folder} on {describe_hosts(apart)} is not the folder that the controller has. Checkpoints, "
            "journal, export and logs of all cards must be in one place: put run.dir on a file system that all hosts "
            "share, at the same path"
        )
    errors = {host: report.write_error for host, report in reports.items() if report.write_error}
    lines += [f"run.dir: {host} cannot write to {folder}: {error}" for host, error in errors.items()]
    for name, file in own.files.items():
        differences = (_difference(name, file, report.files.get(name), host) for host, report in reports.items())
        lines += filter(None, differences)
    return lines


def _difference(name: str, own: Digests | None, theirs: Digests | None, host: Host) -> str:
    if own == theirs:
        return ""
    if theirs is None:
        return f"{name}: {host} does not have this folder; it must be there at the same path, shared or as a copy"
    differing = sorted(file for file in {*(own or {}), *theirs} if (own or {}).get(file) != theirs.get(file))
    listed = ", ".join(differing[:MAX_NAMED]) + (" …" if len(differing) > MAX_NAMED else "")
    what = (
        "its files are not the controller's" if name == CODE else "its folder has other contents than the controller's"
    )
    return f"{name}: {host}: {what}: {listed}"


def digests_of(folder: Path) -> dict[str, str] | None:
    """Return digests of the files of a folder, without its subfolders; None if there is none."""
    if not folder.is_dir():
        return None
    return {path.name: digest_of(path) for path in sorted(folder.iterdir()) if path.is_file()}


def code_digests() -> dict[str, str]:
    """Return digests of the project's own sources, and the versions of what it depends on most."""
    root = Path(__file__).resolve().parents[2]
    digests = {
        str(path.relative_to(root)): digest_of(path)
        for package in PACKAGES
        for path in sorted((root / package).rglob("*"))
        if path.suffix in SOURCES and path.is_file()
    }
    return digests | {f"{name} (its version)": metadata.version(name) for name in VERSIONS}


def digest_of(path: Path, whole_bytes: int = WHOLE_BYTES) -> str:
    """Return the size of a file and a digest (xxh3, 64 bits) of it, or of three pieces if it has more than
    ``whole_bytes``; raise OSError if it cannot be read."""
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= whole_bytes:
            while data := file.read(CHUNK_BYTES):
                digest.update(data)
        else:
            for offset in (0, size // 2, size - PIECE_BYTES):
                file.seek(offset)
                digest.update(file.read(PIECE_BYTES))
    return f"{size}:{digest.hexdigest()}"
