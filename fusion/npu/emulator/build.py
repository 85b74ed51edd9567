"""Build the emulated NPU on first use and load it.

The library is tied to the installed torch, so that an upgrade rebuilds it (`fusion/npu/compiler.py`). Two compilers run
in parallel, each on one part of the sources."""

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from fusion.npu.compiler import BuildError as BuildError
from fusion.npu.compiler import Library, build

HERE = Path(__file__).parent
NAME = "rlfusion_npu"
UNITS = (
    ("cards", "owners", "allocator", "shared", "host", "streams", "copies", "runtime", "alias", "fallback", "kernels"),
    ("hccl", "bindings"),
)
FLAGS = ("-O2", "-fPIC", "-std=c++20", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def emulator_library() -> Library:
    """Describe the library for this torch, Python and these sources."""
    root = Path(torch.__file__).parent
    includes = (HERE, root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    versions = (torch.__version__, str(root), str(sysconfig.get_config_var("SOABI")))
    return Library(
        kind="npu",
        name=NAME,
        units={
            f"unit{number}": "".join(f'#include "{name}.cpp"\n' for name in unit) for number, unit in enumerate(UNITS)
        },
        flags=FLAGS,
        includes=includes,
        links=(f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in LIBRARIES)),
        key=[*(path.name.encode() + b"\0" + path.read_bytes() for path in sources), *map(str.encode, versions)],
    )


def load_extension() -> ModuleType:
    """Build the library if needed (15–30 s on two cores) and import it. Raise BuildError: it cannot be built."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build(emulator_library())))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
