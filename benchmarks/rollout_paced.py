"""Run the part `paced` of `benchmarks/rollout.py`: whole runs on emulated cards of modelled speed, in every order.

Engines of two cards each, EP2, that decode an eighth of a step's requests at a time. A run's speed is that of its
generation, the stage that orders differ in.
"""

from __future__ import annotations

from argparse import Namespace
from statistics import median

from benchmarks.harness import Figures
from benchmarks.paced import Measured, Mode, Workload, run
from benchmarks.runs import temporary_folder
from tests.helpers import MINIMAL, runnable_checkpoint

DIVIDED = ("rollout.schedule.chunk_tokens=8", "rollout.kv_pool.suspended=keep")
ORDERS = {
    "fifo": ("rollout.schedule.order=fifo",),
    "divided": ("rollout.schedule.order=fifo", *DIVIDED),
    **{
        order: (f"rollout.schedule.order={order}", *DIVIDED)
        for order in ("context", "least_generated", "history", "oracle")
    },
}
LENGTHS = {"spread": "0.95,0.25,0", "runaways": "0.95,0.25,0.01"}
"""Standard deviations of the logarithm of lengths, between rows and within a group, and the share of runaways"""


def measure(args: Namespace) -> Figures:
    """Run every order on both distributions of lengths."""
    figures: Figures = {}
    with temporary_folder() as folder:
        moe = dict(num_experts=args.cards, num_experts_per_tok=1, moe_intermediate_size=16)
        runnable_checkpoint(folder / "model", experts=True, **MINIMAL | moe)
        for lengths in list(LENGTHS)[: 1 if args.smoke else None]:
            chosen = [name for name in ORDERS if not args.orders or name in args.orders.split(",")]
            figures[lengths] = compared(
                {order: figures_of(_run(args, LENGTHS[lengths], order, folder)) for order in chosen}
            )
    return figures


def _run(args: Namespace, spread: str, order: str, folder: object) -> Measured:
    layout = ("parallel=single", "parallel.infer.ep=2", "parallel.train.ep=2", f"data.rows={args.prompts}")
    options = (*layout, f"rollout.sampling.forced_spread=[{spread}]", *ORDERS[order])
    workload = Workload(cards=args.cards, prompts=args.prompts, cap=96)
    return run(Mode("colocated", 0), workload, folder, args.steps, options)  # type: ignore[arg-type]


def figures_of(measured: Measured) -> Figures:
    """Return a run's figures, in modelled seconds and tokens: medians of its steps."""
    workload = measured.workload
    gen_s = median(row["timing_s/gen"] for row in measured.rows)
    tokens = median(row["rollout/generated_tokens"] for row in measured.rows)
    return {
        "tokens_per_s": tokens / gen_s * workload.tokens / workload.speed,
        "gen_s": gen_s * workload.speed,
        "tail_s": median(row["timing_s/gen_tail"] for row in measured.rows) * workload.speed,
        "step_s": measured.step_s * workload.speed,
        "chunks": measured.mean("rollout/chunks_total"),
        "recomputed_tokens": measured.mean("rollout/recomputed_tokens"),
        "preemptions": measured.sum("rollout/preemptions"),
        "pace_overrun": measured.overrun,
    }


def compared(by_order: dict[str, Figures]) -> Figures:
    """Return the figures of each order, with its speed over that of `oracle` and of `fifo`."""
    speed = {order: figures["tokens_per_s"] for order, figures in by_order.items()}
    figures: Figures = {}
    for order, one in by_order.items():
        peers = [peer for peer in ("oracle", "fifo") if peer in speed]
        figures[order] = one | {f"ratio_to_{peer}": speed[order] / speed[peer] for peer in peers}
    return figures
