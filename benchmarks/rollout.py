"""Measure how requests are scheduled on engines.

paced: one step's requests on eight emulated cards of modelled speed, four engines of two (EP2) that decode an eighth of
them at a time, in every order: modelled tokens per second of generation, seconds of its tail (in which at most a tenth
of the samples is left), and speed relative to `oracle`, which knows every length. Every run has the same prompts, in
two epochs of the same rows, and the same forced lengths; it differs only in the order in which requests are dispatched,
and in whether responses are divided into chunks. The first step is the first epoch: a warm-up, from which `history`
knows the lengths.

orders: every order in virtual time, with and without runaways: a hundredth of the responses at the maximum, 5 to 8
times the mean, which nothing foretells. Relative to `oracle` with chunks; mean and lowest of the seeds.

    workload   requests            engines          sequences that an engine decodes   queue
    shallow    64 x 8, OLMoE-7B    4 of two dies    16 (8 a rank)                      8 requests a sequence
    even       the same            the same         64                                 2
    deep       600 x 16, 72B       16 of 8 dies     256                                2.3, responses 20 times as long

replay: three published rollouts in virtual time, by the decisions of a run, with every published ratio beside ours
(constants in `rollout_workloads.py`). Every run is the second epoch of the same rows, whose first epoch only the order
`history` and drafts of the last epoch know. Ratios are those of tokens per second; spread is their standard deviation
over seeds. The bound is perfect balance: every engine decodes full batches without a pause or draft.

    mode               requests                                                  drafts
    plain              whole responses, oldest first; a group is bound to an     none
                       engine at the start (veRL)
    divided            in chunks, with a KV pool, oldest first                   none
    context            … in Seer's order                                         none
    seer               … in Seer's order                                         of siblings
    least_generated, history, oracle: … in these orders                          none
    full               … in the order `history`                                  of siblings and of the last epoch

rhyme: RhymeRL's ablation (arXiv 2508.18588) in virtual time. Every run has two epochs of the same rows and two steps
beyond them; the first teaches the lengths, the second is measured, end to end. Nothing is fitted to a ratio. Drafts of
the last epoch are modelled in the first one, too, which is not measured.

    mode        staleness  requests                                                 drafts
    plain       0          whole responses; a group is bound to an engine (veRL)    none
    histopipe   1          … to one of its class, engines shared out evenly         none
    two_tier    1          … shares by search; in chunks, with tail migration       none
    histospec   1          as two_tier                                              of the last epoch
    stalesync   1          in chunks, with a KV pool, in the order `history`        none
    full        1          as stalesync                                             of siblings and the last epoch
    full_s2     2          as full                                                  of siblings and the last epoch
"""

import sys
from argparse import Namespace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Figures, Option

BENCHMARK = Benchmark(
    __doc__,
    {
        "paced": "benchmarks.rollout:paced",
        "orders": "benchmarks.rollout_virtual:orders",
        "replay": "benchmarks.rollout_virtual:replay",
        "rhyme": "benchmarks.rollout_virtual:rhyme",
    },
    [
        Option("steps", 3, smoke=1, help="measured steps of each run of `paced`"),
        Option("seeds", 10, smoke=1, help="seeds of `orders`, `replay` and `rhyme`"),
        Option("first_seed", 1, help="first seed of `rhyme`"),
        Option("workloads", "moonlight,qwen2_vl_72b,kimi_k2", smoke="moonlight", help="of `replay`"),
        Option(
            "texts", "", help="recorded responses, JSON Lines: their acceptance of drafts, too, in `replay` and `rhyme`"
        ),
        Option("part_of_requests", 1, smoke=40),
        Option("queues", "shallow,even,deep", smoke="even"),
        Option("orders", "", smoke="history,oracle"),
        Option("cards", 8, smoke=2),
        Option("prompts", 64, smoke=4),
    ],
    {
        "paced.*.history.ratio_to_oracle": ">= 0.92",
        "paced.runaways.history.ratio_to_fifo": ">= 1.25",
        "paced.*.pace_overrun": "<= 0.03",
        "orders.*.history.ratio_to_oracle": ">= 0.92",
        "replay.moonlight.full.ratio": ">= 2.2",
        "replay.qwen2_vl_72b.full.ratio": ">= 2.2",
        "replay.kimi_k2.full.ratio": ">= 1.6",
        "replay.*.full.tail_cut": ">= 0.80",
        "replay.*.full_with_runaways.tail_cut": ">= 0.70",
        "replay.*.full_over_seer": ">= 1.08",
        "replay.qwen2_vl_72b.plain.abs_deviation_s": "<= 0.20",
        "replay.qwen2_vl_72b.plain.abs_deviation_tail_share": "<= 0.20",
        "replay.qwen2_vl_72b.divided.abs_deviation": "<= 0.10",
        "rhyme.full_over_histospec": ">= 1.01",
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())

from benchmarks.paced import Measured, Mode, Workload, run
from benchmarks.runs import temporary_folder
from tests.helpers import MINIMAL, runnable_checkpoint

DIVIDED = ("rollout.schedule.chunk_tokens=8", "rollout.kv_pool.suspended=keep")
ORDERS = {name: ("rollout.schedule.order=fifo", *options) for name, options in (("fifo", ()), ("divided", DIVIDED))}
ORDERS |= {
    name: (f"rollout.schedule.order={name}", *DIVIDED) for name in ("context", "least_generated", "history", "oracle")
}
LENGTHS = {"spread": "0.95,0.25,0", "runaways": "0.95,0.25,0.01"}
"""Standard deviations of the logarithm of lengths, between rows and within a group, and the share of runaways"""


def paced(args: Namespace) -> Figures:
    """Run every order on both distributions of lengths."""
    figures: Figures = {}
    with temporary_folder() as folder:
        moe = dict(num_experts=args.cards, num_experts_per_tok=1, moe_intermediate_size=16)
        runnable_checkpoint(folder / "model", experts=True, **MINIMAL | moe)
        workload = Workload(cards=args.cards, prompts=args.prompts, cap=96)
        layout = ("parallel=single", "parallel.infer.ep=2", "parallel.train.ep=2", f"data.rows={args.prompts}")
        for name, spread in list(LENGTHS.items())[: 1 if args.smoke else None]:
            found = {}
            for order in (one for one in ORDERS if not args.orders or one in args.orders.split(",")):
                options = (*layout, f"rollout.sampling.forced_spread=[{spread}]", *ORDERS[order])
                found[order] = figures_of(run(Mode("colocated", 0), workload, folder, args.steps, options))
            figures[name] = compared(found)
    return figures


def figures_of(measured: Measured) -> Figures:
    """Return a run's figures, in modelled seconds and tokens: medians of its steps."""
    speed, tokens = measured.workload.speed, measured.workload.tokens
    generated, gen_s, tail_s = (
        median(row[name] for row in measured.rows)
        for name in ("rollout/generated_tokens", "timing_s/gen", "timing_s/gen_tail")
    )
    return {
        "tokens_per_s": generated / gen_s * tokens / speed,
        "gen_s": gen_s * speed,
        "tail_s": tail_s * speed,
        "step_s": measured.step_s * speed,
        "chunks": measured.mean("rollout/chunks_total"),
        "recomputed_tokens": measured.mean("rollout/recomputed_tokens"),
        "preemptions": measured.sum("rollout/preemptions"),
        "pace_overrun": measured.overrun,
    }


def compared(by_order: dict[str, Figures]) -> Figures:
    """Return the figures of each order, with its speed over that of `oracle` and of `fifo`."""
    speed = {order: figures["tokens_per_s"] for order, figures in by_order.items()}
    peers = [peer for peer in ("oracle", "fifo") if peer in speed]
    ratios = {order: {f"ratio_to_{peer}": speed[order] / speed[peer] for peer in peers} for order in by_order}
    return {order: one | ratios[order] for order, one in by_order.items()}
