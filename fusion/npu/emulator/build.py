"""Build the emulated NPU on first use and load it.

    sources + torch + Python + compiler flags ──hash──► ~/.cache/rlfusion/npu-<hash>/rlfusion_npu.so

The hash ties the library to the installed torch, so that an upgrade rebuilds it. Concurrent processes wait for one of
them to build it (by a file lock), and an atomic rename publishes the complete file. Two compilers run in
parallel, each on one part of the sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
NAME = "rlfusion_npu"
UNITS = (
    ("ledger", "heap", "region", "cards", "owners", "allocator", "shared", "host", "streams", "copies", "runtime")
    + ("alias", "fallback", "kernels", "autocast"),
    ("collective", "hccl", "bindings"),
)
FLAGS = ("-O2", "-fPIC", "-std=c++20", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class BuildError(RuntimeError):
    """Raised when the emulator cannot be built; the message is one line that says why and what to do."""


def cache_folder() -> Path:
    """Return the folder of built libraries: `$XDG_CACHE_HOME/rlfusion` or `~/.cache/rlfusion`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "rlfusion"


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (torch.__version__, str(Path(torch.__file__).parent), sysconfig.get_config_var("SOABI"), *FLAGS):
        digest.update(str(part).encode() + b"\0")
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """Return the path of the library for this torch, Python and these sources, built or not."""
    return cache_folder() / f"npu-{_key()}" / f"{NAME}.so"


def build() -> Path:
    """Build the library if needed (15–30 s on two cores) and return its path.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    target = library_path()
    if target.exists():
        return target
    gxx = compiler()
    if gxx is None:
        raise BuildError("no C++ compiler found (install g++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                os.replace(_compile(gxx, Path(folder)), target)
    return target


def _compile(gxx: str, folder: Path) -> Path:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    compilers = []
    for number, unit in enumerate(UNITS):
        source = folder / f"unit{number}.cpp"
        source.write_text("".join(f'#include "{HERE / name}.cpp"\n' for name in unit))
        command = [gxx, "-c", *FLAGS, *(f"-I{path}" for path in includes), str(source), "-o", str(source) + ".o"]
        compilers.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        for process in compilers:
            _finish(process)
    finally:
        for process in compilers:
            process.kill()
    library = folder / f"{NAME}.so"
    objects = [f"{folder}/unit{number}.cpp.o" for number in range(len(UNITS))]
    link = [gxx, "-shared", *objects, "-o", str(library), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
    link += [f"-l{name}" for name in LIBRARIES]
    _finish(subprocess.Popen(link, stderr=subprocess.PIPE, text=True))
    return library


def _finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    if process.returncode != 0:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
        raise BuildError(f"the C++ compiler failed: {first}")


def load_extension() -> ModuleType:
    """Build the library if needed and import it.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    path = build()
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
