"""Import what the processes of tests need: one that is forked from a process that has done so starts in milliseconds.

The list names modules of this project, and what they, Ray and test files import late. It leaves out Ray itself, which
reads its settings when it is imported. The library of the emulated NPU is mapped, not initialised: linking it anew is
most of what opening a card costs a fork.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from importlib import import_module

MODULES = """
    distqueue.core.queue distqueue.payload.shard fusion.colocate.worker fusion.npu.emulator.frontend
    fusion.npu.emulator.operators fusion.rollout.detokenize
    google.protobuf.json_format google.protobuf.timestamp_pb2 hydra hypothesis.strategies jsonschema msgpack
    numpy.ma.extras pdb pyarrow.json pydantic.main pydantic.types pydantic.v1 pytest requests rich.live rich.progress
    sqlite3 stalesync.launch tensorboard.summary.writer.event_file_writer torch.fx.experimental.symbolic_shapes
    transformers.models.auto.tokenization_auto yaml zoneinfo
""".split()

gc.disable()  # what is imported is no garbage: looking for some meanwhile takes a fifth longer
for name in MODULES:
    with suppress(ModuleNotFoundError):  # another version of Ray may not bring it
        import_module(name)

from fusion.npu.compiler import BuildError, build  # noqa: E402
from fusion.npu.emulator.build import emulator_library  # noqa: E402

with suppress(BuildError):
    ctypes.CDLL(str(build(emulator_library())))
gc.freeze()  # nor need the forks
gc.enable()
