"""Make every call of `Ascend` on meta tensors, against one version of torch_npu; print what was found as JSON.

usage: python -m tests.npu.contracts.check VERSION FOLDER   (of an unpacked wheel)
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.model import ModelConfig, Up
from fusion.model.parallel import MIN_DISPATCH_RANKS
from fusion.model.spec import Dense, GroupedQuery, Latent, LayerSpec, Sparse
from fusion.npu.emulator.operators import recorded_schemas, register_gradients
from fusion.npu.operators import AdamW, AdamWStates, PagedRows, ascend, limits
from fusion.npu.operators.ascend import Ascend
from tests.npu.contracts.shapes import shapes
from tests.npu.contracts.wheel import META_KERNELS, SCHEMAS

DECODED, LENGTHS, BLOCKS, BLOCK_SIZE, LONGEST = 64, [1500, 700, 700, 1], 4096, 128, 32768
SCHEMA_ONLY = ("npu_apply_adam_w.out",)
"""Operators whose Meta kernel in the wheels does not take their schema's arguments (`out` for `var`, `m`, `v`)"""
STUBBED_TYPES = "int4 hifloat8 float8_e8m0fnu float4_e2m1fn_x2 float4_e1m2fn_x2 float8_e5m2 float8_e4m3fn".split()


def schemas_of(folder: Path) -> dict[str, str]:
    """Return the wheel's schemas by the operator's name, with its overload."""
    found = re.findall(r"^\s*(?:- )?\s*func: (([\w.]+)\(.*)$", (folder / SCHEMAS).read_text(), re.MULTILINE)
    schemas: dict[str, str] = {}
    for schema, name in found:
        schemas.setdefault(name, schema)
    return schemas


def load_wheel(folder: Path, names: list[str]) -> torch.library.Library:
    """Define all schemas of the wheel that torch can parse (those ``names`` must be), and register its Meta kernels."""
    library = torch.library.Library("npu", "DEF")
    for name, schema in schemas_of(folder).items():
        try:
            library.define(schema)
        except RuntimeError:
            assert name not in names, schema
    _stub("torch_npu", **{name: 285 + number for number, name in enumerate(STUBBED_TYPES)})
    codes = types.SimpleNamespace(**{code: code for code in ("PARAM", "TYPE", "VALUE", "NOT_SUPPORT", "INTERNAL")})
    _stub("torch_npu.utils")
    _stub("torch_npu.utils._error_code", ErrCode=codes, ops_error=str)
    _stub("torch_npu.npu")
    _stub("torch_npu.npu.utils", get_cann_version=lambda *_: "9.1.0")
    _stub("torch_npu.npu._backends", get_soc_version=lambda: 250)
    spec = importlib.util.spec_from_file_location("torch_npu_meta", folder / META_KERNELS)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its registrations end with it
    spec.loader.exec_module(sys.modules[spec.name])
    return library


def _stub(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members, __path__=[])
    sys.modules[name] = module


class Strict(Ascend):
    """Notes what would run composed on a card."""

    def __init__(self) -> None:
        super().__init__()
        self.beyond: list[str] = []

    def _exceeds(self, name: str, broken: list[str]) -> bool:
        self._report(f"{name}: {'; '.join(broken)}")
        return False

    def _report(self, message: str) -> None:
        self.beyond.append(message)


class Calls(TorchDispatchMode):
    """Counts calls of `torch.ops.npu`, and notes those whose arguments are beyond a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: dict[str, int] = {}
        self.beyond: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator.namespace == "npu":
            name = operator._schema.name.removeprefix("npu::")
            name += f".{operator._overloadname}" if operator._overloadname != "default" else ""
            self.checked[name] = self.checked.get(name, 0) + 1
            if name in limits.LIMITS:
                arguments = limits.arguments_of(operator, args, kwargs)
                self.beyond += [f"{name}: {broken}" for broken in limits.beyond(name, arguments)]
            if name in SCHEMA_ONLY:
                return tuple(kwargs[name] for name in ("var", "m", "v"))
        return operator(*args, **kwargs)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


@dataclass(frozen=True)
class Cut:
    """One rank's share of a layer."""

    tp: int
    ep: int
    trains: bool

    @property
    def rows(self) -> int:
        return sum(LENGTHS) if self.trains else DECODED

    def tensor(self, *shape: int) -> torch.Tensor:
        return meta(*shape, grad=self.trains)


def cuts(config: ModelConfig) -> Iterator[Cut]:
    """List the layouts of up to 8 TP ranks and up to all EP ranks, in training and in generation."""
    experts = next((spec.mlp.num_experts for spec in config.layers if isinstance(spec.mlp, Sparse)), 1)
    for tp in (1, 2, 4, 8):
        for ep in sorted({1, min(8, experts), min(64, experts // 2), experts // 2, experts} - {0}):
            for trains in (False, True):
                if config.attention.num_heads % tp == 0 and experts % ep == 0:
                    yield Cut(tp, ep, trains)


def run_layer(table: Ascend, hidden: int, eps: float, spec: LayerSpec, cut: Cut) -> None:
    """Call what one rank calls in a layer, and its backward pass."""
    x, weight = cut.tensor(cut.rows, hidden), cut.tensor(hidden)
    outs = [*table.add_rms_norm(x, cut.tensor(cut.rows, hidden), weight, eps), table.rms_norm(x, weight, eps)]
    match spec.attention:
        case GroupedQuery():
            outs.append(grouped_query(table, spec.attention, cut, eps))
        case Latent():
            outs += latent(table, spec.attention, cut)
    match spec.mlp:
        case Dense():
            outs.append(table.swiglu(cut.tensor(cut.rows, 2 * max(1, spec.mlp.width // cut.tp))))
        case Sparse():
            outs += sparse(table, spec.mlp, hidden, cut)
    if cut.trains:
        torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])


def rope(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return meta(rows, 1, width), meta(rows, 1, width)


def grouped_query(table: Ascend, spec: GroupedQuery, cut: Cut, eps: float) -> torch.Tensor:
    heads, kv_heads = spec.num_heads // cut.tp, max(1, spec.num_kv_heads // cut.tp)
    qkv = cut.tensor(cut.rows, heads + 2 * kv_heads, spec.head_dim)
    norms = (cut.tensor(spec.head_dim), cut.tensor(spec.head_dim)) if spec.qk_norm == "head" else (None, None)
    q, k, v = table.norm_rope(qkv, *norms, rope(cut.rows, spec.rotary.width), kv_heads, eps)
    if cut.trains:
        return table.varlen_attention(q, k, v, LENGTHS)
    pool = meta(2 * BLOCKS, kv_heads, BLOCK_SIZE, spec.head_dim)
    table.store_kv(pool, meta(2 * cut.rows * kv_heads, dtype=torch.int64), k, v, None)
    chunk(table, heads, kv_heads, (spec.head_dim, spec.head_dim))
    part_of_tokens(table, spec, cut, heads, pool)
    out = table.paged_attention(q, pool, paged_rows(cut.rows), None, spec.head_dim**-0.5)
    assert out.shape == q.shape
    return out


def latent(table: Ascend, spec: Latent, cut: Cut) -> list[torch.Tensor]:
    heads, rotary = spec.num_heads // cut.tp, spec.rotary
    both = rope(cut.rows, spec.rope_dim)
    outs = [table.rotate(cut.tensor(cut.rows, n, spec.rope_dim), both, rotary.interleaved) for n in (heads, 1)]
    outs.append(table.rms_norm(cut.tensor(cut.rows, spec.kv_rank), cut.tensor(spec.kv_rank), spec.norm_eps))
    if cut.trains:
        q, k = (cut.tensor(cut.rows, heads, spec.head_dim) for _ in range(2))
        outs.append(table.varlen_attention(q, k, cut.tensor(cut.rows, heads, spec.value_dim), LENGTHS))
        return outs
    chunk(table, heads, heads, (spec.head_dim, spec.value_dim))
    pool = meta(BLOCKS, 1, BLOCK_SIZE, spec.cached_width)
    latents = meta(cut.rows, spec.kv_rank), meta(cut.rows, spec.rope_dim)
    table.store_latents(pool, meta(cut.rows, dtype=torch.int64), *latents, None)
    kv_b = torch.nn.Parameter(meta(heads * (spec.nope_dim + spec.value_dim), spec.kv_rank), requires_grad=False)
    up = Up(kv_b, spec, table)
    absorbed, rotated = up.absorb(meta(cut.rows, heads, spec.head_dim)[..., : spec.nope_dim]), outs[0]
    attended = table.paged_latent_attention(absorbed, rotated, pool, paged_rows(cut.rows), spec.softmax_scale)
    assert up.values(attended).shape == (cut.rows, heads, spec.value_dim)
    part_of_tokens(table, spec, cut, heads, pool)
    return outs


def part_of_tokens(table: Ascend, spec: GroupedQuery | Latent, cut: Cut, heads: int, pool: torch.Tensor) -> None:
    """Call what attends with the heads of all ranks that share KV to this rank's part of it."""
    width, channels, scale = None, pool.shape[-1], 0.1
    if isinstance(spec, Latent):
        width, channels, scale = spec.kv_rank, spec.kv_rank, spec.softmax_scale
    copies = spec.kv_copies(cut.tp)
    for ranks in (ranks for ranks in range(2, copies + 1) if copies % ranks == 0):
        q = meta(cut.rows, ranks * heads, pool.shape[-1])
        out, lse = table.partial_attention(q, pool, paged_rows(cut.rows), width, scale)
        assert out.shape == (cut.rows, ranks * heads, channels) and lse.shape == out.shape[:2]


def paged_rows(rows: int) -> PagedRows:
    blocks = LONGEST // BLOCK_SIZE
    flat = [meta(n, dtype=torch.int64) for n in (rows * blocks, rows, rows)]
    return PagedRows(*flat, meta(rows, blocks, dtype=torch.int32), (LONGEST,) * rows)


def chunk(table: Ascend, heads: int, kv_heads: int, widths: tuple[int, int]) -> None:
    """Call what a part of a prompt calls, which attends to what is in the cache too."""
    q, k, v = meta(512, heads, widths[0]), meta(LONGEST, kv_heads, widths[0]), meta(LONGEST, kv_heads, widths[1])
    assert table.varlen_attention(q, k, v, [512], None, [LONGEST]).shape == (512, heads, widths[1])


def sparse(table: Ascend, spec: Sparse, hidden: int, cut: Cut) -> list[torch.Tensor]:
    local, router = spec.num_experts // cut.ep, spec.router
    logits = meta(cut.rows, spec.num_experts, dtype=torch.float32 if router.float32 else torch.bfloat16)
    with torch.no_grad():
        weights, experts = table.gate(logits, router, meta(spec.num_experts) if router.correction else None)
    assert weights.shape == experts.shape == (cut.rows, router.top_k) and experts.dtype == torch.int32
    x, order, counts = table.permute(cut.tensor(cut.rows, hidden), experts, spec.num_experts)
    y = table.unpermute(x, order, weights.detach().requires_grad_(cut.trains))
    received, arriving = cut.tensor(*x.shape), meta(local, dtype=torch.int64)
    stacks = cut.tensor(local, 2 * spec.width, hidden), cut.tensor(local, hidden, spec.width)
    outs = [y]
    assert table.takes_counts(x, local)
    outs.append(table.experts(received, arriving, stacks))
    if not cut.trains:
        last = range(spec.num_experts - local, spec.num_experts)
        rows = cut.tensor(cut.rows, hidden)
        outs.append(table.local_experts(rows, experts, weights, spec.num_experts, last, stacks))
    if not cut.trains and cut.ep >= MIN_DISPATCH_RANKS:
        dispatched(table, spec, cut, meta(cut.rows, hidden), experts, weights, stacks)
    return outs


def dispatched(
    table: Ascend, spec: Sparse, cut: Cut, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, stacks: Any
) -> None:
    """Call what sends rows to experts, where it is within its limits: beyond them rows are gathered."""
    arguments = dict(x=x[:1], expert_ids=experts, ep_world_size=cut.ep, moe_expert_num=spec.num_experts)
    if limits.beyond("npu_moe_distribute_dispatch_v2", arguments):
        return
    group: Any = SimpleNamespace(size=lambda: cut.ep, rank=lambda: cut.ep - 1, group_name="group")
    with patch.object(ascend, "communicator_name", lambda group: "group"), patch.object(ascend, "is_a3", lambda: True):
        assert table.max_dispatched_rows(
            cut.ep, spec.num_experts, spec.router.top_k, hidden=x.shape[1], dtype=x.dtype
        ) == min(512, limits.rows_of_buffer(cut.ep, spec.num_experts // cut.ep, spec.router.top_k, x.shape[1]))
        y = table.dispatched_experts(x, experts, weights, group, cut.rows, stacks)
    assert y.shape == x.shape


def optimizer(table: Ascend) -> None:
    states = AdamWStates(*([meta(4096, dtype=torch.float32)] for _ in range(4)))
    table.adamw(states, AdamW(3, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8))


def main(version: str, folder: Path) -> dict[str, Any]:
    recorded = recorded_schemas(version)
    wheel = schemas_of(folder)
    failed = [f"schema of {name}: {wheel.get(name)}" for name in recorded if recorded[name] != wheel.get(name)]
    library = load_wheel(folder, list(recorded))
    register_gradients(library)
    table, calls, composed = Strict(), Calls(), []

    def attempt(what: str, call: Callable[[], None]) -> None:
        table.beyond.clear()
        try:
            with calls:
                call()
        except Exception as error:  # noqa: BLE001, whatever a kernel raises is a finding
            failed.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
        composed.extend(f"{what}: {one}" for one in table.beyond)
        failed.extend(f"{what}: {one}" for one in calls.beyond)
        calls.beyond.clear()

    models = shapes()
    for name, config in models.items():
        for cut in cuts(config):
            for spec in dict.fromkeys(config.layers):
                what = f"{name} tp={cut.tp} ep={cut.ep} {'training' if cut.trains else 'generation'}"
                attempt(
                    what,
                    lambda spec=spec, cut=cut, config=config: run_layer(
                        table, config.hidden_size, config.rms_norm_eps, spec, cut
                    ),
                )
    attempt("optimizer", lambda: optimizer(table))
    return {
        "checked": sum(calls.checked.values()),
        "operators": sorted(calls.checked),
        "families": sorted({config.family for config in models.values()}),
        "failed": failed,
        "composed": composed,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
