"""Measure the engine against transformers' `generate` on one MoE checkpoint, and against its matrix products alone.

qwen3_moe: grouped-query attention. deepseek_v3: latent attention of the same hidden size, layers and experts. equal: 64
sequences of 64 new tokens. ragged: 256 sequences of up to 256 new tokens that end at a stop token. Both sides sample at
temperature 1 from the same weights and prompts; the engine also returns logprobs. Only tokens up to the stop token
count. All sides run in turns; figures are medians. The floor repeats the products with weight matrices of the engine's
steps, with the same numbers of rows and evenly loaded experts, and nothing else (no attention).
"""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, medians, rows_of, timed, timed_result

BENCHMARK = Benchmark(
    __doc__,
    [
        Option("family", "qwen3_moe", help="the model's family", choices=("qwen3_moe", "deepseek_v3")),
        Option("rounds", 5, smoke=1, help="rounds that are measured"),
    ],
    "qwen3_moe.equal.ratio_to_hf >= 1.5, qwen3_moe.ragged.ratio_to_hf >= 3.5, "
    "deepseek_v3.equal.ratio_to_hf >= 1.0, deepseek_v3.ragged.ratio_to_hf >= 2.5",
    sizes={"part_of_a_case": (1, 16)},
)
BENCHMARK.run_as(__name__)

import torch

from benchmarks.models import PlainCpu, engine_of, requests_of
from benchmarks.runs import temporary_folder
from fusion.inference import EmbeddedEngine, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.model.spec import GroupedQuery, Latent

SIZES: dict[str, Any] = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
SIZES |= dict(num_attention_heads=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
SIZES |= dict(tie_word_embeddings=True, initializer_range=0.08, max_position_embeddings=1024)
SIZES |= dict(eos_token_id=1, pad_token_id=0)
LATENTS = dict(q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
LATENTS |= dict(num_key_value_heads=4, n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1)
GROUPED = dict(num_key_value_heads=2, head_dim=32, num_experts=8)
SHAPES = {"qwen3_moe": SIZES | GROUPED, "deepseek_v3": SIZES | LATENTS}
"""Family → the fields of its model"""
CASES: dict[str, tuple[int, int, tuple[int, ...]]] = {"equal": (64, 64, ()), "ragged": (256, 256, (1,))}
"""Sequences, new tokens, and stop tokens"""
PROMPT_TOKENS = 16


def measure(args: Arguments) -> Figures:
    torch.set_num_threads(1)
    hf, engine = build(args.family)

    def measure_case(name: str) -> Figures:
        batch, new_tokens, stop = CASES[name]
        size = batch // args.part_of_a_case, PROMPT_TOKENS
        prompts = torch.randint(2, SIZES["vocab_size"], size, generator=torch.manual_seed(1))
        return Sides(hf, engine, prompts, new_tokens // args.part_of_a_case, stop).measure(args.rounds)

    return {args.family: rows_of(CASES, measure_case)}


def build(family: str) -> tuple[Any, EmbeddedEngine]:
    from transformers import AutoConfig, AutoModelForCausalLM

    device: Any = PlainCpu()
    with temporary_folder() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPES[family])).save_pretrained(folder)
        hf = AutoModelForCausalLM.from_pretrained(folder).eval()
        model = Transformer(ModelConfig.from_hf(str(folder)), Mesh.single(), device)
        load_weights(model, str(folder))
    return hf, engine_of(model, max_length=PROMPT_TOKENS + 256, max_seqs=256, kv_fraction=0.5)


@dataclass
class Sides:
    """The sides on one batch of prompts. ``rows``: of the weight matrices' products in the steps of the engine's latest
    run, which the floor repeats; ``tokens``: that it generated."""

    hf: Any
    engine: EmbeddedEngine
    prompts: torch.Tensor
    new_tokens: int
    stop: tuple[int, ...]
    rows: list[int] = field(default_factory=list)
    tokens: int = 0

    def measure(self, rounds: int) -> Figures:
        """Return medians of tokens per second; every round has other noise and the same prompts."""
        self.run_engine(-2)  # the floor repeats its steps
        rates = in_turns({"engine": self.run_engine, "hf": self.run_hf, "floor": self.run_floor}, rounds)
        figures: Figures = medians(rates, "_tokens_per_s")
        figures["ratio_to_hf"] = figures["engine_tokens_per_s"] / figures["hf_tokens_per_s"]
        return figures

    def run_engine(self, round: int) -> float:
        engine, rows, outputs = self.engine, list[int](), list[Any]()
        engine.policy_version = round  # so that no cached prefix of the previous round is reused
        params = SamplingParams(max_tokens=self.new_tokens, stop_token_ids=self.stop)
        requests = requests_of(self.prompts.tolist(), params, round)

        def generate() -> None:
            engine.submit(requests)
            while len(outputs) < len(requests):
                before = engine.scheduler.counters.generated_tokens
                outputs.extend(engine.step())
                rows.append(engine.scheduler.counters.generated_tokens - before)

        seconds = timed(generate)
        self.rows, self.tokens = [self.prompts.numel(), *rows[1:]], sum(len(output.tokens) for output in outputs)
        return self.tokens / seconds

    def run_hf(self, round: int) -> float:
        ids, stop = self.prompts, self.stop[0] if self.stop else None
        self.hf.generation_config.eos_token_id = stop
        sampling: Any = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=self.new_tokens)

        def generate() -> torch.Tensor:
            with torch.inference_mode():
                return self.hf.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **sampling)

        seconds, sequences = timed_result(generate)
        stops = (sequences[:, PROMPT_TOKENS:] == (-1 if stop is None else stop)).long()
        useful = int((stops.cumsum(1) - stops == 0).sum())  # up to the first stop token
        return useful / seconds

    def run_floor(self, round: int) -> float:
        return self.tokens / timed(lambda: run_products(self.engine.model, self.rows))


def run_products(model: Transformer, rows: list[int]) -> None:
    """Compute the products with weight matrices of steps with these numbers of rows."""
    config = model.config
    with torch.inference_mode():
        for n in rows:
            share = -(-n * config.top_k // config.num_experts)
            for layer in model.layers.values():
                _run_attention_products(layer.attention, n)
                dense = layer.moe.shared if layer.is_sparse else layer.mlp
                mlps = [(dense, n)] if dense is not None else []
                if layer.is_sparse:
                    _multiply(layer.moe.router, n)
                    mlps += [(expert, share) for expert in layer.moe.experts.values()]
                for mlp, count in mlps:
                    _multiply(mlp.gate_up, count)
                    _multiply(mlp.down, count)
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
