"""Describe adapters: beside a matrix W [O, I] of a frozen base a product of low rank, so that a layer computes
W x + s B (A x), and only A [r, I] and B [O, r] are trained (LoRA, arXiv 2106.09685). Pure.

    q_proj [Oq, I] ┐                          ┌ A of q, k and v, stacked [3 r, I]    attention.qkv.lora_a
    k_proj [Ok, I] ├ attention.qkv [O, I]  +  │
    v_proj [Ov, I] ┘                          └ B of each [Oq, r], [Ok, r], [Ov, r]  attention.qkv.lora_b.0, .1, .2

Each matrix of a Hugging Face folder has a pair of its own; only an expert's gate and up share one, as they are one
tensor in transformers, and so to peft. A is cut as the input of its matrix, B as its output. So where outputs are cut,
A is replicated, and its gradients are partial sums of ranks as those of norms are; where inputs are cut, B is.

Invariants: base and adapters never share a unit of storage (`plan_units`); nothing of the base is trained."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fusion.model.local_param import LocalParam, Part

ATTENTION, MLP, EXPERTS = TARGETS = ("attention", "mlp", "experts")
"""What may have adapters: matrices of attention; those of dense layers and shared experts; those of routed experts"""
CUT_INPUTS = ("out", "down")
"""Local matrices whose input TP cuts, by the last part of their names"""
ADAPTED = ("qkv", "q", "q_a", "q_b", "kv_a", "kv_b", "gate_up", *CUT_INPUTS)
"""Local matrices that may have adapters, by the last part of their names"""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: their ``rank``, ``alpha``, which divided by the rank is their factor, and which of
    `TARGETS` have some."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def with_adapters(table: Iterable[LocalParam], adapters: Adapters, etp: int) -> tuple[LocalParam, ...]:
    """Return the local tensors of a rank with those of its adapters. ``etp``: ranks that an expert is split over."""
    return tuple(param for matrix in table for param in (replace(matrix, frozen=True), *_pair(matrix, adapters, etp)))


def target_of(param: LocalParam) -> str | None:
    """Return which of `TARGETS` a local matrix of the embedded format belongs to; None: it has no adapters."""
    path, _, last = param.name.rpartition(".")
    if last not in ADAPTED or param.storage != "unit":
        return None
    if param.expert:
        return EXPERTS
    return ATTENTION if path.endswith("attention") else MLP


def _pair(matrix: LocalParam, adapters: Adapters, etp: int) -> list[LocalParam]:
    if target_of(matrix) not in adapters.targets:
        return []
    rank, width = adapters.rank, matrix.shape[1]
    shares_input = matrix.expert and len(matrix.parts) == 2
    sources = [_fused(matrix.parts, etp)] if shares_input else [(part.name, (part,)) for part in matrix.parts]
    inputs = tuple(
        Part(_name(name, "A"), ((0, rank), parts[0].region[1]), ((at, at + rank), (0, width)))
        for at, (name, parts) in zip(range(0, rank * len(sources), rank), sources, strict=True)
    )
    cuts_input = matrix.name.rpartition(".")[2] in CUT_INPUTS
    stack = f"{matrix.stack}.lora_%s" if matrix.stack else ""
    first = replace(
        matrix,
        name=f"{matrix.name}.lora_a",
        shape=(rank * len(sources), width),
        parts=inputs,
        tp_sharded=matrix.tp_sharded and cuts_input,
        row_group=1,
        stack=stack % "a" if stack else None,
    )
    pair = [first]
    for number, (name, parts) in enumerate(sources):
        top = parts[0].local[0][0]
        outputs = tuple(
            Part(_name(name, "B"), (part.region[0], (0, rank)), ((start - top, stop - top), (0, rank)))
            for part in parts
            for start, stop in (part.local[0],)
        )
        pair.append(
            replace(
                first,
                name=f"{matrix.name}.lora_b" + (f".{number}" if len(sources) > 1 else ""),
                shape=(parts[-1].local[0][1] - top, rank),
                parts=outputs,
                tp_sharded=matrix.tp_sharded and not cuts_input,
                stack=stack % "b" if stack else None,
            )
        )
    return pair


def _fused(parts: tuple[Part, ...], etp: int) -> tuple[str, tuple[Part, ...]]:
    """Return an expert's gate and up as one matrix, the rows of up behind those of gate."""
    gate, up = parts
    width = (gate.region[0][1] - gate.region[0][0]) * etp
    (start, stop), columns = up.region
    name = f"{gate.name.removesuffix('.weight').rpartition('.')[0]}.gate_up_proj.weight"
    return name, (gate, replace(up, region=((start + width, stop + width), columns)))


def _name(matrix: str, letter: str) -> str:
    """Return the name of an adapter's tensor as peft forms it."""
    return f"{matrix.removesuffix('.weight')}.lora_{letter}.weight"
