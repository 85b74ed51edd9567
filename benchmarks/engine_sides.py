"""Run the sides of `benchmarks/engine.py`: the engine, transformers' `generate`, and the matrix products alone."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.rotation import in_rotation
from fusion.inference import EmbeddedEngine, Request, RolloutConfig, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.model.spec import GroupedQuery, Latent

SIZES = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    norm_topk_prob=True,
    tie_word_embeddings=True,
    initializer_range=0.08,
    max_position_embeddings=1024,
    eos_token_id=1,
    pad_token_id=0,
)
SHAPE = SIZES | dict(num_key_value_heads=2, head_dim=32, num_experts=8)
LATENT_SHAPE = SIZES | dict(
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
SHAPES = {"qwen3_moe": SHAPE, "deepseek_v3": LATENT_SHAPE}
"""Family → the fields of its model"""
PROMPT_TOKENS = 16


class PlainCpu:
    """Stands in for a device: the plain CPU, with no emulated card. Both sides run on it by default."""

    torch_device = torch.device("cpu")

    def owner(self, name: str) -> Any:
        return nullcontext()

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def memory(self) -> Any:
        return SimpleNamespace(free=1 << 30)

    def synchronize(self) -> None:
        pass

    def describe(self) -> str:
        return "plain CPU"


def build(device: Any, batch_invariant: bool, family: str = "qwen3_moe") -> tuple[Any, EmbeddedEngine]:
    """Load transformers' model and the engine from one checkpoint folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SHAPES[family])
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        hf = AutoModelForCausalLM.from_pretrained(folder).eval().to(device.torch_device)
        if device.torch_device.type not in ("cpu", "cuda"):
            hf.set_experts_implementation("eager")  # the grouped one needs operations that only cpu and cuda have
        mesh = Mesh.single()
        model = Transformer(ModelConfig.from_hf(folder), mesh, device, batch_invariant=batch_invariant)
        load_weights(model, folder)
    rollout = RolloutConfig(
        max_length=PROMPT_TOKENS + 256, max_seqs=256, kv_fraction=0.5, batch_invariant=batch_invariant
    )
    engine = EmbeddedEngine(model, mesh, device, config=rollout)
    engine.allocate_kv()
    return hf, engine


def measure(
    hf: Any, engine: EmbeddedEngine, device: Any, *, rounds: int, batch: int, new_tokens: int, stop: tuple[int, ...]
) -> dict[str, float]:
    """Run engine, `generate` and floor in every round, in rotating order, with other noise and the same prompts.

    The floor repeats the steps of the engine's latest run; `ratio_to_hf` is the ratio of both medians.
    """
    torch.manual_seed(1)
    prompts = torch.randint(2, SHAPE["vocab_size"], (batch, PROMPT_TOKENS))
    case: dict[str, Any] = dict(prompts=prompts, new_tokens=new_tokens, stop=stop)
    rates: dict[str, list[float]] = {"engine": [], "hf": [], "floor": []}
    useful_share = []
    for round_ in range(-1, rounds):
        round_rates = {}
        for side in in_rotation(list(rates), round_ + 1):  # the first round begins with the engine
            if side == "engine":
                rows, tokens, seconds = run_engine(engine, device, round_=round_, **case)
                round_rates[side] = tokens / seconds
            elif side == "hf":
                hf_tokens, hf_slots, seconds = run_hf(hf, device, **case)
                round_rates[side] = hf_tokens / seconds
            else:
                seconds = timed(device, lambda rows=rows: run_products(engine.model, rows))
                round_rates[side] = tokens / seconds
        if round_ >= 0:  # the first round warms up
            useful_share.append(hf_tokens / hf_slots)
            for side, rate in round_rates.items():
                rates[side].append(rate)
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "engine_tokens_per_s": medians["engine"],
        "hf_tokens_per_s": medians["hf"],
        "ratio_to_hf": medians["engine"] / medians["hf"],
        "floor_tokens_per_s": medians["floor"],
        "hf_useful_share": statistics.median(useful_share),
    }


def run_engine(
    engine: EmbeddedEngine, device: Any, *, prompts: torch.Tensor, new_tokens: int, stop: tuple[int, ...], round_: int
) -> tuple[list[int], int, float]:
    """Return the rows of every step, useful tokens, seconds."""
    engine.policy_version = round_  # so that no cached prefix of the previous round is reused
    params = SamplingParams(max_tokens=new_tokens, stop_token_ids=stop)
    requests = [Request(f"{round_}-{i}", tuple(row), params) for i, row in enumerate(prompts.tolist())]
    rows: list[int] = []
    outputs: list = []

    def generate() -> None:
        engine.submit(requests)
        while not outputs or len(outputs) < len(requests):
            before = engine.scheduler.counters.generated_tokens
            outputs.extend(engine.step())
            rows.append(engine.scheduler.counters.generated_tokens - before)

    seconds = timed(device, generate)
    rows[0] = prompts.numel()
    return rows, sum(len(output.tokens) for output in outputs), seconds


def run_hf(
    hf: Any, device: Any, *, prompts: torch.Tensor, new_tokens: int, stop: tuple[int, ...]
) -> tuple[int, int, float]:
    """Return useful tokens, computed slots, seconds."""
    ids = prompts.to(device.torch_device)
    hf.generation_config.eos_token_id = stop[0] if stop else None
    kwargs: dict[str, Any] = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=new_tokens)
    sequences: list[torch.Tensor] = []

    def generate() -> None:
        with torch.inference_mode():
            output = hf.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **kwargs)
            sequences.append(output.cpu())

    seconds = timed(device, generate)
    new = sequences[0][:, PROMPT_TOKENS:]
    ended = (new == stop[0]).long().cumsum(1) if stop else torch.zeros_like(new)
    useful = int(((ended == 0) | ((ended == 1) & (new == (stop[0] if stop else -1)))).sum())
    return useful, new.numel(), seconds


def run_products(model: Transformer, rows: list[int]) -> None:
    """Compute the products with weight matrices of steps with these numbers of rows."""
    config = model.config
    with torch.inference_mode():
        for n in rows:
            share = -(-n * config.top_k // config.num_experts)
            for layer in model.layers.values():
                _run_attention_products(layer.attention, n)
                if layer.is_sparse:
                    _multiply(layer.moe.router, n)
                    for expert in layer.moe.experts.values():
                        _multiply(expert.gate_up, share)
                        _multiply(expert.down, share)
                    mlp = layer.moe.shared
                else:
                    mlp = layer.mlp
                if mlp is not None:
                    _multiply(mlp.gate_up, n)
                    _multiply(mlp.down, n)
            _multiply(model.lm_head, n)


def _run_attention_products(attention: Any, rows: int) -> None:
    """Compute those of grouped-query attention, or of latent attention with absorbed projections."""
    if isinstance(attention.spec, GroupedQuery):
        _multiply(attention.qkv, rows)
    else:
        spec: Latent = attention.spec
        for matrix in (attention.q_a, attention.q_b, attention.kv_a):
            _multiply(matrix, rows)
        by_head = attention.kv_b.unflatten(0, (spec.num_heads, -1))
        keys, values = by_head.split([spec.nope_dim, spec.value_dim], dim=1)
        torch.bmm(by_head.new_ones(spec.num_heads, rows, spec.nope_dim), keys)
        torch.bmm(by_head.new_ones(spec.num_heads, rows, spec.kv_rank), values.transpose(1, 2))
    _multiply(attention.out, rows)


def _multiply(weight_OD: torch.Tensor, rows: int) -> None:
    torch.mm(weight_OD.new_ones(rows, weight_OD.shape[1]), weight_OD.t())


def timed(device: Any, work: Callable[[], None]) -> float:
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start
