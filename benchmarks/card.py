"""Measure a card in at most ten minutes: its operators, a decode step, a training step and the offload of a switch.

A model of the shape of Qwen3-30B-A3B in bfloat16, with random weights, cut to as many layers as the card's memory
holds. Every figure stands beside its floor: the larger of its bytes at the rate of a copy on the card and of its
operations at that of one large matrix product, both measured in the same run.

operators   seconds and `over_floor` of operators of the card's table (`device.operators`)
decode      one token of each of 64 sequences of 2,048: seconds a step and a layer, tokens/s, over_floor; graphs: the
            same steps replayed, where the table is captured; vllm: the same of vLLM, where it is installed and the card
            real
step        a profile of one decode step: kernels and microseconds of a layer, and of all outside of the layers
train       forward, backward and update of 16,384 tokens, in sequences of an eighth: tokens/s, over_floor
switch      optimizer states to the host and back, over one plain copy each way
"""

import gc
import importlib.util
import json
import multiprocessing
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import Arguments, Benchmark, Figures, Option, progress, rows_of, timed

BENCHMARK = Benchmark(
    __doc__,
    [
        Option("device", "auto", smoke="emulated", help="a kind of fusion.npu"),
        Option("operators", "auto", help="a table of `device.operators`"),
        Option("rounds", 5, smoke=1, help="rounds that are measured"),
        Option("layers", 48, smoke=1, help="layers at most"),
    ],
    parts={part: part for part in ("operators", "decode", "step", "train", "switch")},
    sizes={"divisor": (1, 32), "copied_bytes": (1 << 30, 1 << 16), "width": (8192, 64)}
    | {"batch": (64, 3), "context": (2048, 20), "steps": (32, 2), "tokens": (16384, 64)},
)
BENCHMARK.run_as(__name__)

import torch
import yaml

from benchmarks import offload
from benchmarks.models import engine_of as engine_of_model
from benchmarks.models import requests_of
from benchmarks.runs import temporary_folder
from fusion.costmodel.shape import Shape
from fusion.inference import EmbeddedEngine, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer
from fusion.npu import Device, open_device
from fusion.npu.config import STACKING
from fusion.npu.operators import block_tokens
from fusion.resources import SHAPES
from fusion.training import EmbeddedTrainEngine, Sequences, TrainingConfig
from fusion.training.algorithms import cross_entropy

WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")
BYTES = 2
STATES_BYTES = 16
"""Bytes of a trained element beside its weight: fp32 gradient, master and two moments"""
SHARE = 0.6
"""Share of the free memory that weights, or weights and states, take; the rest is for KV and activations"""


def shape_of(args: Arguments) -> dict[str, Any]:
    """Return the fields of Qwen3-30B-A3B, widths divided by ``args.divisor``."""
    shape = yaml.safe_load((SHAPES / "qwen3_30b_a3b.yaml").read_text())["config"]
    narrower = {name: shape[name] // args.divisor for name in WIDTHS}
    narrower |= {"head_dim": max(16, shape["head_dim"] // args.divisor), "max_position_embeddings": 40960}
    return shape | narrower | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}


class Floors(NamedTuple):
    """What the card reaches: in a copy, both ends counted, and in a product."""

    copy_gb_per_s: float
    product_tflops: float

    @classmethod
    def measure(cls, device: Device, args: Arguments) -> "Floors":
        source = torch.ones(args.copied_bytes, dtype=torch.uint8, device=device.torch_device)
        target, width = torch.empty_like(source), args.width
        x = torch.randn(width, width, dtype=torch.bfloat16, device=device.torch_device)
        copy_s = seconds(device, lambda: target.copy_(source), args.rounds)
        product_s = seconds(device, lambda: torch.mm(x, x), args.rounds)
        floors = cls(2e-9 * args.copied_bytes / copy_s, 2e-12 * width**3 / product_s)
        progress("floors", floors._asdict())
        return floors

    def of(self, took_s: float, nbytes: float, flops: float = 0.0) -> Figures:
        """Return the seconds of some work, and these over its floor."""
        floor_s = max(1e-9 * nbytes / self.copy_gb_per_s, 1e-12 * flops / self.product_tflops)
        return {"seconds": took_s, "over_floor": took_s / floor_s}


def seconds(device: Device, work: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of a call, after one that warms up."""
    work()
    return median(timed(work, device=device) for _ in range(rounds))


def config_of(args: Arguments, layers: int, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**shape_of(args), "num_hidden_layers": layers, **changes})


def num_elements(config: ModelConfig) -> int:
    return Shape("card", config).numel


def model_of(device: Device, args: Arguments, element_bytes: int, layers: int | None = None) -> Transformer:
    """Build the model with random weights, of so many layers, or of as many as `SHARE` of the free memory holds."""
    if layers is None:
        one, two = (num_elements(config_of(args, number)) for number in (1, 2))
        fitting = int(SHARE * device.memory().free / element_bytes - (2 * one - two)) // (two - one)
        layers = max(1, min(args.layers, fitting))
    model = Transformer(config_of(args, layers), Mesh.single(), device, torch.bfloat16)
    with torch.no_grad():  # on the card: `models.randomise` draws on the host
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return model


def operators(args: Arguments) -> Figures:
    device = open_device(args.device, operators=args.operators)
    table, floors, shape = device.operators, Floors.measure(device, args), shape_of(args)
    rows, d, inner = args.tokens, shape["hidden_size"], shape["moe_intermediate_size"]
    heads, kv_heads, channels = (shape[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    experts, k = shape["num_experts"], shape["num_experts_per_tok"]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device.torch_device)

    x, weight, permuted = random(rows, d), random(d), random(rows * k, d)
    gate_up, down = random(experts, 2 * inner, d), random(experts, d, inner)
    counts = torch.full((experts,), rows * k // experts, device=device.torch_device)
    lengths = [rows // 8] * 8
    q, key = random(rows, heads, channels), random(rows, kv_heads, channels)
    rows_by_expert: Any = counts if table.takes_counts(permuted, experts) else counts.tolist()
    works: dict[str, tuple[Callable[[], object], float, float]] = {
        "rms_norm": (lambda: table.rms_norm(x, weight, 1e-6), 2 * x.nbytes, 0.0),
        "swiglu": (lambda: table.swiglu(x), 1.5 * x.nbytes, 0.0),
        "experts": (
            lambda: table.experts(permuted, rows_by_expert, (gate_up, down)),
            2 * permuted.nbytes + gate_up.nbytes + down.nbytes,
            6.0 * rows * k * d * inner,
        ),
        "varlen_attention": (
            lambda: table.varlen_attention(q, key, key, lengths),
            2 * (q.nbytes + key.nbytes),
            2.0 * rows * lengths[0] * heads * channels,
        ),
    }

    def measure(name: str) -> Figures:
        work, nbytes, flops = works[name]
        return floors.of(seconds(device, work, args.rounds), nbytes, flops)

    with torch.inference_mode():
        return {"table": table.name, "card": device.describe(), **floors._asdict(), **rows_of(works, measure)}


def decode(args: Arguments) -> Figures:
    device = open_device(args.device, operators=args.operators)
    figures = _decode(device, args)
    gc.collect()
    device.empty_cache()
    if device.kind == "emulated" or not importlib.util.find_spec("vllm"):
        print("vLLM is not measured: it is not installed, or the card is emulated")
        return figures
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return figures | {"vllm": pool.apply(vllm_decode, (args, figures["layers"]))}


def step(args: Arguments) -> Figures:
    """Profile one decode step of models of one and of three layers: kernels that it starts on a CUDA card, their
    microseconds, and those of the whole step, which profiling slows."""
    device = open_device(args.device, operators=args.operators)

    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU] + [activity.CUDA] * (device.kind == "cuda")

    def measure(layers: int) -> Figures:
        engine = engine_of(model_of(device, args, BYTES, layers), args)
        engine.submit(requests_of(prompts_of(args), SamplingParams(max_tokens=64)))
        while engine.scheduler.waiting or any(one.computed <= args.context for one in engine.scheduler.running):
            engine.step()
        with torch.profiler.profile(activities=activities) as profile:
            took_s = timed(engine.step, device=device)
        engine.release_kv()
        us = [one.time_range.elapsed_us() for one in profile.events() or () if one.device_type.name == "CUDA"]
        return {"kernels": len(us), "card_us": sum(us), "call_us": 1e6 * took_s}

    one, three = rows_of((1, 3), measure).values()
    layer = {name: (three[name] - one[name]) / 2 for name in one}
    return {"layer": layer, "outside": {name: one[name] - layer[name] for name in one}}


def engine_of(model: Transformer, args: Arguments, graphs: bool = False) -> EmbeddedEngine:
    limits = dict(block_size=max(16, block_tokens(model.device.kind, model.operators.name)), max_seqs=args.batch)
    limits["max_response_length"] = args.context + args.steps + 64
    return engine_of_model(model, **limits, prefix_cache=False, graphs=graphs)


def _decode(device: Device, args: Arguments) -> Figures:
    """Measure what ``args.steps`` more tokens take of each sequence; where the table has them, with graphs, too."""
    floors, model = Floors.measure(device, args), model_of(device, args, BYTES)
    config, layers, prompts = model.config, model.config.num_layers, prompts_of(args)
    kv_bytes = 2 * layers * config.attention.num_kv_heads * config.attention.head_dim * BYTES  # type: ignore[union-attr]
    nbytes = BYTES * num_elements(config) + args.batch * args.context * kv_bytes

    def measured(graphs: bool) -> Figures:
        engine = engine_of(model, args, graphs)

        def generate(tokens: int) -> None:
            engine.submit(requests_of(prompts, SamplingParams(max_tokens=tokens), tokens))
            assert sum(len(out.tokens) for out in engine.run()) == args.batch * tokens

        if graphs:
            generate(args.steps + 1)  # captures
        step_s = step_seconds(lambda tokens: timed(lambda: generate(tokens), device=device), args)
        engine.release_kv()
        figures = floors.of(step_s, nbytes) | {"layer_us": 1e6 * step_s / layers, "tokens_per_s": args.batch / step_s}
        return progress(f"decode{', graphs' * graphs}", figures)

    figures = measured(graphs=False) | {"layers": layers, "table": device.operators.name}
    return figures | ({"graphs": measured(graphs=True)} if device.operators.name in STACKING else {})


def prompts_of(args: Arguments) -> list[tuple[int, ...]]:
    size, random = (args.batch, args.context), torch.Generator().manual_seed(0)
    return [*map(tuple, torch.randint(2, shape_of(args)["vocab_size"], size, generator=random).tolist())]


def step_seconds(generate: Callable[[int], float], args: Arguments) -> float:
    """Return the seconds of a step; ``generate`` returns those of generating so many tokens of each sequence."""
    generate(2)
    rounds = [(generate(1 + args.steps) - generate(1)) / args.steps for _ in range(args.rounds)]
    return max(median(rounds), 1e-9)


def vllm_decode(args: Arguments, layers: int) -> Figures:
    from vllm import LLM, SamplingParams

    with temporary_folder() as folder:
        (folder / "config.json").write_text(json.dumps({**shape_of(args), "num_hidden_layers": layers}))
        limits = dict(max_model_len=args.context + args.steps + 16, max_num_seqs=args.batch)
        options: Any = dict(load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False)
        llm = LLM(str(folder), dtype="bfloat16", **limits, **options)
        prompts: Any = [{"prompt_token_ids": [*prompt]} for prompt in prompts_of(args)]

        def generate(tokens: int) -> float:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
            return timed(lambda: llm.generate(prompts, params, use_tqdm=False))

        step_s = step_seconds(generate, args)
    return {"seconds": step_s, "tokens_per_s": args.batch / step_s}


def train(args: Arguments) -> Figures:
    device = open_device(args.device, operators=args.operators)
    floors, model = Floors.measure(device, args), model_of(device, args, BYTES + STATES_BYTES)
    settings = TrainingConfig(recompute=True, token_budget=max(args.tokens, 1 << 10))
    engine = EmbeddedTrainEngine(model, model.mesh, device, settings)
    length = args.tokens // 8
    mask = torch.ones(args.tokens, dtype=torch.bool)
    mask[::length] = False
    tokens = torch.randint(2, model.config.vocab_size, (args.tokens,), generator=torch.Generator().manual_seed(0))
    ones, zeros = torch.ones(args.tokens), torch.zeros(args.tokens)
    batch = Sequences(tokens, [length] * 8, mask, advantages=ones, behaviour_logprobs=zeros)

    def step() -> None:
        engine.forward_backward(batch, cross_entropy)
        engine.optimizer_step()

    took_s, config = seconds(device, step, args.rounds), model.config
    of_a_token = config_of(args, config.num_layers, num_experts=8)  # the chosen ones
    active = num_elements(of_a_token) - config.vocab_size * config.hidden_size
    figures = floors.of(took_s, STATES_BYTES * num_elements(config), 8.0 * active * args.tokens)
    return progress("train", figures | {"tokens_per_s": args.tokens / took_s, "layers": config.num_layers})


def switch(args: Arguments) -> Figures:
    device = open_device(args.device, operators=args.operators)
    rates = offload.compared(device, min(device.memory().free // 8, 8 * args.copied_bytes), 8, args.rounds)
    return {
        name: {"gb_per_s": one["gb_per_s"], "over_floor": one["seconds"] / rates["floor"]["seconds"]}
        for name, one in rates.items()
    }
