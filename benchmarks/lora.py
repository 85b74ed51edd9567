"""Measure training adapters (LoRA) against training all weights: HBM, and the time of each part.

switch     four cards that train and generate in two layouts: time of both ways over that without adapters
hbm, step  one card: HBM of a training step, and its time, over those of training all weights
decode     one card: time of generating 64 sequences, over that without adapters

A Qwen3-MoE of 89M parameters (fp32) on emulated NPUs, one process and one thread a card; all matrices have adapters of
rank 16. Both sides run in turns; ratios are those of medians.
"""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.harness import Arguments, Benchmark, Figures, Option, progress, ratio_in_turns, timed

BENCHMARK = Benchmark(
    __doc__,
    [Option("rounds", 5, smoke=1, help="rounds that are measured")],
    "switch.ratio <= 1.1, hbm.ratio <= 0.45, step.ratio <= 1.1, decode.ratio <= 1.3",
    sizes={"rank": (16, 2), "layers": (8, 2), "hidden": (512, 64), "tokens": (256, 32)},
)
BENCHMARK.run_as(__name__)

from dataclasses import replace

import torch

from benchmarks.models import engine_of, model_of, moe_of, on_cards, requests_of
from fusion.inference import SamplingParams
from fusion.model import ModelConfig, Parallel
from fusion.model.adapters import Adapters
from fusion.npu import Device
from fusion.training import EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import cross_entropy
from fusion.training.config import LoraConfig
from tests.ep_switch.pair import Pair
from tests.training.ranks import sample_batch

SEQUENCES, PROMPT_TOKENS, NEW_TOKENS, BUCKET_BYTES = 64, 16, 32, 16 << 20
SWITCHES_A_ROUND = 8
"""Both ways of a switch take a tenth of a second, a step or decoding some seconds"""


def measure(args: Arguments) -> Figures:
    full, figures = moe_of(args), Figures()
    models = {"lora": replace(full, adapters=Adapters(args.rank, 2.0 * args.rank)), "full": full}
    for ranks, part in ((4, _switch), (1, _train), (1, _decode)):
        figures |= on_cards(part, ranks, models, args)[0]
        progress(part.__name__.strip("_"), figures)
    return figures


def _switch(rank: int, device: Device, models: Mapping[str, ModelConfig], args: Arguments) -> Figures:
    ends = dict(one=Parallel(4, tp=2, ep=2), other=Parallel(4, ep=4))
    pairs = {name: Pair(config, device, **ends) for name, config in models.items()}
    sides = {name: lambda _, pair=pair: sum(pair.switch(end)[0] for end in (0, 1)) for name, pair in pairs.items()}
    return {"switch": ratio_in_turns(sides, SWITCHES_A_ROUND * args.rounds)}


def _train(rank: int, device: Device, models: Mapping[str, ModelConfig], args: Arguments) -> Figures:
    batch = sample_batch(max(2, args.tokens // 9), 3, vocabulary=32 * args.hidden)
    peak, sides = dict[str, int](), dict[str, Callable[[int], float]]()

    def work(engine: EmbeddedTrainEngine) -> None:
        engine.forward_backward(batch, cross_entropy)
        engine.optimizer_step()

    for name, config in models.items():
        before = device.memory().allocated
        model = model_of(config, device, bucket_bytes=BUCKET_BYTES)
        lora = LoraConfig(rank=config.adapters.rank if config.adapters else 0)
        settings = TrainingConfig(lora=lora, lr=1e-4, token_budget=args.tokens, load_balancing_coef=0.0)
        step = partial(work, EmbeddedTrainEngine(model, model.mesh, device, settings))
        step()
        device.reset_peak()
        step()
        device.synchronize()
        peak[name] = device.memory().peak_allocated - before
        sides[name] = lambda _, step=step: timed(step, device=device)
    return {"hbm": peak | {"ratio": peak["lora"] / peak["full"]}, "step": ratio_in_turns(sides, args.rounds)}


def _decode(rank: int, device: Device, models: Mapping[str, ModelConfig], args: Arguments) -> Figures:
    engines = {}
    for name, config in models.items():
        model = model_of(config, device, bucket_bytes=BUCKET_BYTES).requires_grad_(False)
        engines[name] = engine_of(model, max_length=PROMPT_TOKENS + NEW_TOKENS, max_seqs=SEQUENCES, kv_fraction=0.3)
    prompts = torch.randint(2, 100, (SEQUENCES, PROMPT_TOKENS), generator=torch.manual_seed(1)).tolist()

    def run(name: str, round: int) -> float:
        engines[name].policy_version = round  # no prefix of another round is reused
        engines[name].submit(requests_of(prompts, SamplingParams(max_tokens=NEW_TOKENS), round))
        return timed(engines[name].run, device=device)

    return {"decode": ratio_in_turns({name: partial(run, name) for name in models}, args.rounds)}
