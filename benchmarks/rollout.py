"""Measure how requests are scheduled on engines.

orders: every order in virtual time, with and without runaways: a hundredth of the responses at the maximum, 5 to 8
times the mean, which nothing foretells. Relative to `oracle` with chunks; mean and lowest of the seeds.

    workload   requests            engines          sequences that an engine decodes   queue
    shallow    64 x 8, OLMoE-7B    4 of two dies    16 (8 a rank)                      8 requests a sequence
    even       the same            the same         64                                 2
    deep       600 x 16, 72B       16 of 8 dies     256                                2.3, responses 20 times as long

replay: three published rollouts in virtual time, by the decisions of a run, with every published ratio beside ours
(constants in `rollout_workloads.py`). Every run is the second epoch of the same rows, whose first epoch only the order
`history` and drafts of the last epoch know. Ratios are those of tokens per second; spread is their standard deviation
over seeds. The bound is perfect balance: every engine decodes full batches without a pause or draft. Modes: plain:
whole responses, oldest first, a group bound to an engine at the start (veRL); divided: in chunks, with a KV pool;
context, least_generated, history, oracle: divided in these orders (context is Seer's); seer: context with drafts of
siblings; full: history with drafts of siblings and of the last epoch.

rhyme: RhymeRL's ablation (arXiv 2508.18588) in virtual time. Every run has two epochs of the same rows and two steps
beyond them; the first teaches the lengths, the second is measured, end to end. Nothing is fitted to a ratio. Drafts of
the last epoch are modelled in the first one, too, which is not measured. Modes, at staleness 1 but for plain (0) and
full_s2 (2): histopipe: whole responses, to an engine of their class, engines shared out evenly; two_tier: shares by
search, in chunks, with tail migration; histospec: with drafts of the last epoch; stalesync: in chunks, with a KV pool,
in the order `history`; full, full_s2: with drafts of siblings and the last epoch.
"""

from benchmarks.harness import Benchmark, Option

BENCHMARK = Benchmark(
    __doc__,
    {part: f"benchmarks.rollout_virtual:{part}" for part in ("orders", "replay", "rhyme")},
    [
        Option("seeds", 10, smoke=1, help="seeds of `orders`, `replay` and `rhyme`"),
        Option("first_seed", 1, help="first seed of `rhyme`"),
        Option("workloads", "moonlight,qwen2_vl_72b,kimi_k2", smoke="moonlight", help="of `replay`"),
        Option(
            "texts", "", help="of `replay` and `rhyme`: recorded responses, whose acceptance of drafts is used, too"
        ),
    ],
    "orders.*.history.ratio_to_oracle >= 0.92, replay.moonlight.full.ratio >= 2.2, "
    "replay.qwen2_vl_72b.full.ratio >= 2.2, replay.kimi_k2.full.ratio >= 1.6, replay.*.full.tail_cut >= 0.80, "
    "replay.*.full_with_runaways.tail_cut >= 0.70, replay.*.full_over_seer >= 1.08, "
    "replay.qwen2_vl_72b.plain.abs_deviation_s <= 0.20, "
    "replay.qwen2_vl_72b.plain.abs_deviation_tail_share <= 0.20, "
    "replay.qwen2_vl_72b.divided.abs_deviation <= 0.10, rhyme.full_over_histospec >= 1.01",
    sizes={"part_of_requests": (1, 40), "queues": ("shallow,even,deep", "even")} | {"orders": ("", "history,oracle")},
)
BENCHMARK.run_as(__name__)
