"""Define the config group `device`."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from fusion.telemetry.keys import SET, Unsupported, key
from fusion.telemetry.validation import Checks, Group

KINDS = ("auto", "npu", "cuda", "emulated")
STREAMS = ("eager", "adversarial", "timed")
OPERATORS = {
    "auto": KINDS,
    "plain": KINDS,
    "cpu": ("emulated",),
    "ascend": ("npu", "emulated"),
    "cuda": ("cuda",),
    "cuda_fused": ("cuda",),
}
"""`device.operators` → the kinds of card that have them"""
OF_KIND = {"emulated": "cpu", "ledger": "cpu", "npu": "ascend"}
"""Kind of `Device` → name of its table; those of CUDA depend on what is installed, others have the plain one"""
CUDA_TORCH, FUSED_TORCH = (2, 13), (2, 11)
"""The first versions of torch that have all operators of the tables `cuda` and `cuda_fused`"""
MAX_GATHERED_TOKENS = 1 << 20
"""Maximum tokens of KV that paged rows gather at a time (at least one row): bounds the memory of a call"""
STACKING = ("ascend", "cuda", "cuda_fused")
"""Tables that state `stacks_experts` (`fusion/npu/operators`)"""
DEFAULT_CAPACITY_BYTES = 2 << 30


@dataclass
class DeviceConfig(Group, path="device"):
    """Select the cards of a run and configure emulated ones."""

    kind: str = key("auto", one_of=KINDS, timeless=True)
    """`npu` (Ascend, through torch_npu), `cuda`, `emulated` (an NPU on the CPU), or `auto`: the first of these that is
    present."""
    capacity_bytes: int | None = key(None, at_least=1, at_most=1 << 50)
    """HBM of one card in bytes. Emulated: its size; null: 2 GiB. Real: a limit for each process; null: the whole
    card."""

    operators: str = key("auto", one_of=tuple(OPERATORS))
    """The table of operators that model, KV cache and optimizer call (`fusion/npu/operators`): `ascend` (Ascend's own;
    on emulated cards references of these), `cuda` (PyTorch's fused ones), `cuda_fused` (these, and Triton kernels in
    generation), `cpu` (fused, of emulated cards), `plain` (composed of PyTorch's), or `auto`: the fastest that the card
    has."""

    deterministic: bool = key(False, only={"kind": ("auto", "npu", "cuda")}, refused=False)
    """Real cards: vendors' operators and collectives add in one order, so that equal runs are equal to the bit
    (`torch.use_deterministic_algorithms`; slower). Operators that have no such order warn. Emulated cards always do."""

    streams: str = key("eager", one_of=STREAMS, only={"kind": ("auto", "emulated")}, refused=False)
    """Emulated cards: when asynchronous work is executed. `eager`: when it is called. `adversarial`: non-blocking
    copies and collectives as late as synchronisation allows, and freed memory is poisoned, so that a missing wait
    becomes a wrong result (slower). `timed`: as adversarial, and non-blocking copies to and from the host and
    collectives take time of their own beside what the card computes, so that overlap is real."""

    host_bytes_per_s: float = key(1e9, above=0, only={"streams": ("timed",)}, refused=False)
    """Rate of an emulated card's copies to and from the host, of each stream, with `streams=timed`."""

    wire_bytes_per_s: float = key(1e9, above=0, only={"streams": ("timed",)}, refused=False)
    """Rate of its collectives, sent or received, of each group, with `streams=timed`."""

    pace: str | None = key(
        None,
        only={"kind": ("emulated",)},
        unsupported_by={"vllm": Unsupported("the time of vLLM's steps is not modelled")},
    )
    """Emulated cards: the model whose step times are reproduced, on the cards that `cluster.hardware` names: a preset
    of recipes/shapes or a Hugging Face folder (`fusion/costmodel/pace.py`). null: steps run at the host's speed."""

    pace_tokens: int = key(1, at_least=1, only={"pace": SET}, refused=False)
    """Tokens of the modelled run per token of this run, in prompts, responses and contexts."""

    pace_speed: float = key(1.0, above=0, only={"pace": SET}, refused=False)
    """Seconds of the modelled run per second of this run. With the value of `pace_tokens` a decode step takes as long
    as in the modelled engine."""

    pace_training: float = key(1.0, above=0, only={"pace": SET}, refused=False)
    """Factor on the time of a training step, for the additional samples that the modelled run trains or scores."""

    def check(self, check: Checks) -> None:
        kinds = OPERATORS[self.operators]
        check.that("operators", self.kind in (*kinds, "auto"), f"device.kind={'|'.join(kinds)}; it is {self.kind}")


def table_of(kind: str, name: str = "auto") -> str:
    """Return the name of the table of operators of a device of ``kind`` with ``device.operators=name``."""
    if name != "auto":
        return name
    if kind != "cuda":
        return OF_KIND.get(kind, "plain")
    return next((table for table in ("cuda_fused", "cuda") if not lacking(table)), "plain")


def lacking(name: str) -> str:
    """Return what the table ``name`` needs and this environment lacks; "" if nothing."""
    needed = {"cuda": CUDA_TORCH, "cuda_fused": FUSED_TORCH}.get(name, (0, 0))
    if tuple(map(int, version("torch").split(".")[:2])) < needed:
        return f"it needs torch {needed[0]}.{needed[1]}, installed is {version('torch')}"
    return "it needs triton, which is not installed" if name == "cuda_fused" and not find_spec("triton") else ""


def claim(kind: str, cluster: Mapping[str, float]) -> tuple[str, dict[str, Any]]:
    """Return the kind of card that a run uses on a Ray cluster with these resources, and an actor's resource request.

    ``auto`` selects Ascend cards if the cluster has any, else CUDA cards, else emulated ones."""
    if kind == "auto":
        kind = "npu" if cluster.get("NPU") else "cuda" if cluster.get("GPU") else "emulated"
    requests: dict[str, dict[str, Any]] = {
        "npu": {"num_cpus": 1, "resources": {"NPU": 1}},
        "cuda": {"num_cpus": 1, "num_gpus": 1},
        "emulated": {"num_cpus": 0},
    }
    return kind, requests[kind]
