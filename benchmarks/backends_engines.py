"""Compare engines: tokens per second of the embedded engine, of vLLM as ours, and of vLLM alone.

    python benchmarks/backends_engines.py --json engines.json [--rounds 5] [--dtype float32]

In an environment with vLLM (bash scripts/environment.sh --backend vllm). The Qwen3-MoE of benchmarks/backends.py on one
card, one process and one thread for each side; all sides have the same weights and generate as many tokens for the same
requests, in turns, in rotating order. Figures are medians; the first round warms up.

    embedded     this project's engine
    vllm         rollout.backend=vllm: vLLM's scheduler and model with our control channel, sampler and memory
    vllm_plain   vLLM's own engine in one process, with its sampler and log-probabilities of sampled tokens, computing
                 from plain weight tensors as ours does (vllm_host.py): what control channel, sampler and memory cost
    vllm_alone   the same as installed: with packed copies of its weights, which a switch could not write
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIDES = ("embedded", "vllm", "vllm_plain", "vllm_alone")
ALONE = SIDES[2:]
REQUESTS, PROMPT, TOKENS, MAX_SEQS = 96, 48, 64, 64
BLOCK = 32
ROLLOUT: dict[str, Any] = dict(
    max_length=256, max_seqs=MAX_SEQS, max_batch_tokens=1024, block_size=BLOCK, max_kv_tokens=16384, prefix_cache=False
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    from benchmarks.rotation import in_rotation

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(Path(folder), args.dtype)
        pipes, processes = {}, []
        for name in SIDES:
            pipes[name], there = context.Pipe()
            processes.append(context.Process(target=serve, args=(name, folder, args.dtype, there), daemon=True))
            processes[-1].start()
            there.close()
            pipes[name].recv()  # one after the other: they share the cores

        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        for number in range(-1, args.rounds):
            for name in in_rotation(SIDES, number):
                pipes[name].send(None)
                took = pipes[name].recv()
                if number >= 0:
                    seconds[name].append(took)
        for process in processes:
            process.terminate()
            process.join()
    result = {"parameters": parameters, "dtype": args.dtype, "rounds": args.rounds, "figures": summary(seconds)}
    figures = result["figures"]
    for name in SIDES:
        print(f"{name:12}{figures[name]['gen_tokens_per_s']:10.0f} tokens/s")
    for name in ALONE:
        print(f"vllm / {name} {figures[name]['ratio']:.2f} (median of {args.rounds} rounds)")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return tokens per second of every side, and the median over rounds of vLLM as ours over vLLM alone."""
    tokens = REQUESTS * TOKENS
    figures = {name: {"gen_tokens_per_s": tokens / statistics.median(values)} for name, values in seconds.items()}
    for name in ALONE:
        ratios = [theirs / ours for ours, theirs in zip(seconds["vllm"], seconds[name], strict=True)]
        figures[name]["ratio"] = statistics.median(ratios)
    return figures


def write_model(folder: Path, dtype: str) -> int:
    """Write a checkpoint with random weights; return its number of parameters."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.backends import SHAPE
    from fusion.model import ModelConfig, global_params

    config, generator = ModelConfig.from_hf(SHAPE), torch.Generator().manual_seed(5)
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=generator)).to(
            getattr(torch, dtype)
        )
        for name, shape in global_params(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_hf(dtype)))
    return sum(tensor.numel() for tensor in tensors.values())


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, 4000) for _ in range(PROMPT)] for _ in range(REQUESTS)]


def serve(name: str, folder: str, dtype: str, pipe: Any) -> None:
    """Build a side, then generate all requests at every message, and answer with the seconds that it took."""
    import torch

    torch.set_num_threads(1)
    generate = (alone if name in ALONE else ours)(name, folder, dtype)
    pipe.send(None)
    while True:
        pipe.recv()
        began = time.perf_counter()
        generate()
        pipe.send(time.perf_counter() - began)


def ours(name: str, folder: str, dtype: str) -> Callable[[], None]:
    import torch

    from fusion.inference import EmbeddedEngine, InferEngine, Request, RolloutConfig, SamplingParams
    from fusion.model import Mesh, ModelConfig, Transformer, load_weights
    from fusion.npu import open_device

    device, mesh, config = open_device("emulated"), Mesh.single(), ModelConfig.from_hf(folder)
    rollout, weights = RolloutConfig(backend=name, **ROLLOUT), getattr(torch, dtype)
    model: Any
    engine: InferEngine
    if name == "vllm":
        from fusion.inference.backends.vllm_engine import VllmEngine
        from fusion.inference.backends.vllm_model import VllmModel

        model = VllmModel(config, mesh, device, weights, rollout=rollout)
        engine = VllmEngine(model, mesh, device, rollout)
    else:
        model = Transformer(config, mesh, device, weights)
        engine = EmbeddedEngine(model, mesh, device, rollout)
    load_weights(model, folder)
    engine.allocate_kv()
    params, number = SamplingParams(max_tokens=TOKENS, stop_token_ids=()), 0

    def generate() -> None:
        nonlocal number
        number += 1
        engine.submit([Request(f"{number}/{i}", tuple(ids), params) for i, ids in enumerate(prompts())])
        outputs = engine.step()
        while not engine.idle:
            outputs += engine.step()
        assert sum(len(output.tokens) for output in outputs) == REQUESTS * TOKENS

    return generate


def alone(name: str, folder: str, dtype: str) -> Callable[[], None]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import EngineArgs, LLMEngine, SamplingParams

    if name == "vllm_plain":
        from fusion.inference.backends.vllm_host import compute_from_plain_tensors

        compute_from_plain_tensors()
    arguments: Any = dict(
        dtype=dtype,
        max_model_len=ROLLOUT["max_length"],
        block_size=BLOCK,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=ROLLOUT["max_batch_tokens"],
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            generation_config="vllm",
            enforce_eager=True,
            async_scheduling=False,
            disable_log_stats=True,
            kv_cache_memory_bytes=256 << 20,
            logprobs_mode="processed_logprobs",
            **arguments,
        )
    )
    params, number = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0), 0

    def generate() -> None:
        nonlocal number
        number += 1
        for i, ids in enumerate(prompts()):
            engine.add_request(f"{number}/{i}", {"prompt_token_ids": ids}, params)
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        assert tokens == REQUESTS * TOKENS

    return generate


if __name__ == "__main__":
    main()
