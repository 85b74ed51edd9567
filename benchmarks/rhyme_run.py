"""Train three epochs with drafts from history and siblings (RhymeRL, arXiv 2508.18588) and without, in wall clock.

A MoE of 26M parameters, of which 6M compute a token, is warmed up on sums with every step written out; then whole runs
of both sides train it by GRPO, in turns: staleness 0, `batch_invariant`, two emulated cards with an engine of at most
four sequences each, where decoding is bound by the weights that it reads, as on a card. Every step's samples must be
equal token for token. Figures are of the epochs behind the first, medians over the steps of all rounds:
generation_ratio: seconds of generation without drafts over those with; step_ratio: of steps, at least 0.95 / (1 - share
+ share / 1.8), and 1.2; share: that of generation in a step without drafts.
"""

import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, progress

BENCHMARK = Benchmark(
    __doc__,
    [Option("rounds", 2, smoke=1, help="runs of each side")],
    "both.generation_ratio >= 1.8, both.step_ratio >= 1.2, both.step_ratio_over_expected >= 0.95, "
    "both.equal_samples >= 1",
    extra="config overrides of both sides",
    sizes={"prompts": (4, 2), "steps_of_epoch": (4, 1), "target": ("", "0"), "hidden": (384, 64)},
)
BENCHMARK.run_as(__name__)

from benchmarks.runs import Row, make_base, temporary_folder, train

EPOCHS, GROUP = 3, 4
SPEED_UP = 1.8
"""Of generation, for which a step's is expected"""
OPTIONS = f"""cluster.npus=2 device=emulated parallel=single data=worked data.max_prompt_length=64 reward=arithmetic
rollout=batch_invariant rollout.engine.max_seqs=4 rollout.max_response_length=96 algorithm=grpo
algorithm.group_size={GROUP} training.lr=1e-4 training.weight_decay=0 training.load_balancing_coef=0
run.eval_prompts=0""".split()


class Run(NamedTuple):
    """A run's metrics by step, and ``trained``: what tells whether two runs trained on the same samples: the lengths of
    all, the texts of those that are logged, and the norms of gradients."""

    rows: list[Row]
    trained: str

    def behind_first_epoch(self, name: str) -> list[float]:
        return [row[name] for row in self.rows[len(self.rows) // EPOCHS :]]


def measure(args: Arguments) -> Figures:
    with temporary_folder() as folder:
        base = _make_base(folder, args)
        own = f"""model.path={base} run.steps={EPOCHS * args.steps_of_epoch} data.prompts_per_step={args.prompts}
        data.rows={args.prompts * args.steps_of_epoch}""".split()

        def run(drafts: str, round: int) -> Run:
            home = folder / f"{drafts}-{round}"
            rows = train(home, [*OPTIONS, *own, f"rollout.drafts.source={drafts}", *args.overrides], timeout_s=1200)
            files = (home / "run" / name for name in ("samples.jsonl", "groups.jsonl"))
            said, groups = (sorted(file.read_text().splitlines()) for file in files)
            run = Run(rows, json.dumps([said, groups, [row["actor/grad_norm"] for row in rows]]))
            seconds = {name: median(run.behind_first_epoch(f"timing_s/{name}")) for name in ("gen", "step")}
            progress(f"{drafts}, round {round + 1}", seconds)
            return run

        sides = {drafts: partial(run, drafts) for drafts in ("none", "both")}
        return _compared(in_turns(sides, args.rounds, warm_ups=0))


def _make_base(folder: Path, args: Arguments) -> Path:
    """Warm up a Qwen3-MoE in which the forward pass takes most of a step."""
    heads = args.hidden // 64
    config: dict[str, Any] = dict(model_type="qwen3_moe", hidden_size=args.hidden, intermediate_size=args.hidden)
    config |= dict(num_hidden_layers=4, num_attention_heads=heads, num_key_value_heads=max(1, heads // 3), head_dim=64)
    config |= dict(num_experts=12, num_experts_per_tok=2, moe_intermediate_size=args.hidden * 7 // 6)
    config |= dict(norm_topk_prob=True, tie_word_embeddings=True)
    shape = folder / "shape.yaml"
    shape.write_text(json.dumps({"config": config}))
    return make_base(folder / "base", "worked_arithmetic", "--shape", str(shape), target=args.target)


def _compared(runs: dict[str, list[Run]]) -> Figures:
    def of(side: str, name: str) -> float:
        return median(value for run in runs[side] for value in run.behind_first_epoch(name))

    gen, step = ({side: of(side, f"timing_s/{name}") for side in runs} for name in ("gen", "step"))
    share = gen["none"] / step["none"]
    ratio, expected = step["none"] / step["both"], 1 / (1 - share + share / SPEED_UP)
    figures: Figures = {side: {"gen_s": gen[side], "step_s": step[side]} for side in runs}
    figures["both"] |= {
        "generation_ratio": gen["none"] / gen["both"],
        "step_ratio": ratio,
        "step_ratio_over_expected": ratio / expected,
        "share": share,
        "draft_share": of("both", "rollout/draft_share_mean"),
        "reward_first": runs["both"][0].rows[0]["critic/rewards/mean"],
        "reward_last": runs["both"][0].rows[-1]["critic/rewards/mean"],
        "equal_samples": float(len({run.trained for side in runs.values() for run in side}) == 1),
    }
    return figures
