"""Measure training a group whose responses share the rows of their prompt against training whole sequences.

n8      a prompt of 1,024 tokens, 8 responses of 64: time of forward and backward without shared rows over that with
        `training.share_prefixes=auto`; the floor is that ratio if time were rows
short   a prompt of 16 tokens, 8 responses of 512: `auto` shares nothing, and costs nothing

A Qwen3-MoE of 53M parameters (fp32) on one emulated NPU with one thread. Both sides run in turns; ratios are those of
medians.
"""

from functools import partial

from benchmarks.harness import Arguments, Benchmark, Figures, Option, ratio_in_turns, rows_of, timed

BENCHMARK = Benchmark(
    __doc__,
    [Option("rounds", 3, smoke=1, help="rounds that are measured")],
    "n8.ratio >= 3, short.ratio >= 0.95, short.shared_rows_share <= 0",
    sizes={"layers": (4, 2), "hidden": (512, 64), "long": (1024, 256), "answer": (512, 64)},
)
BENCHMARK.run_as(__name__)

import torch

from benchmarks.models import model_of, moe_of
from fusion.npu import open_device
from fusion.training import EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import cross_entropy
from fusion.training.objective import SHARED
from tests.training.sequences import sequences_of

GROUP, SHORT_ANSWER, SHORT_PROMPT = 8, 64, 16
TOKEN_BUDGET, CAPACITY_BYTES = 2304, 4 << 30
"""Of both sides: two whole sequences of the long prompt, or all that share it"""


def measure(args: Arguments) -> Figures:
    device = open_device("emulated", capacity_bytes=CAPACITY_BYTES)
    model = model_of(moe_of(args), device, bucket_bytes=16 << 20)
    settings = TrainingConfig(token_budget=TOKEN_BUDGET, load_balancing_coef=0.0)
    engine = EmbeddedTrainEngine(model, model.mesh, device, settings)
    shapes = {"n8": (args.long, SHORT_ANSWER), "short": (SHORT_PROMPT, args.answer)}
    return rows_of(shapes, lambda name: _compare(engine, *shapes[name], args.rounds))


def _compare(engine: EmbeddedTrainEngine, prompt: int, answer: int, rounds: int) -> Figures:
    """Measure a group whose prompt and responses have so many tokens."""
    random, sizes = torch.Generator().manual_seed(0), (prompt, *[answer] * GROUP)
    shared, *responses = (torch.randint(2, 1000, (size,), generator=random).tolist() for size in sizes)
    batch, figures = sequences_of([shared] * GROUP, responses), {"floor": 1.0, "shared_rows_share": 0.0}

    def work() -> None:
        metrics = engine.forward_backward(batch, cross_entropy)
        if SHARED in metrics:
            figures.update(floor=1 / (1 - metrics[SHARED]), shared_rows_share=metrics[SHARED])

    def run(share: str, _: int) -> float:
        engine.config.share_prefixes = share
        return timed(work, device=engine.model.device)

    return ratio_in_turns({share: partial(run, share) for share in ("off", "auto")}, rounds) | figures
