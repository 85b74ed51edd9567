"""Compare deployments and systems side by side, and with what their authors published, on one page.

deployments: separate, colocated, full and hybrid at staleness 0 and 1, with the same prompts, lengths and reference, on
emulated cards of modelled speed (`device=paced`): processes, Ray, queue and switches are real, and only the time that
cards take is modelled. `separate` divides the cards so that the modelled work of a step would be done first; whether
training fits into the HBM of so few is not modelled. Steps that run ahead are long and short in turns: two say little.
schedules: requests in order of arrival, in the order `history`, without and in chunks, and HistoPipe one step ahead.
drafts: an engine's tokens a CPU second with drafts and without, in turns: this is wall clock.

Every cell of the table says where it is from: `measured` (a clock around real work), `paced`, `simulated`, `published`
or `input` (chosen, not found out). The page also has a typical step of every deployment on one axis of time.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Arguments, Benchmark, Figures, Option

BENCHMARK = Benchmark(
    __doc__,
    [
        Option("out", "runs/compare", smoke="", help="folder of the runs and of compare.html"),
        Option("simulated", False, help="simulate the published model and cluster, too"),
        Option("steps", 4, smoke=1, help="measured steps of each run"),
    ],
    "*.pace_overrun <= 0.03",
    sizes={"cards": (4, 2), "prompts": (16, 2), "speed": (44.0, 3000.0), "bounds": ((0, 1), (0,))}
    | {"deployments": (("separate", "colocated", "full", "hybrid"), ("separate", "full"))}
    | {"rounds": (1, 1), "layers": (8, 1), "live": ((1, 8), (1,)), "new_tokens": (128, 8)},
)
BENCHMARK.run_as(__name__)

from benchmarks.drafts import real
from benchmarks.paced import MAX_OVERRUN, Mode, Workload, run
from benchmarks.runs import temporary_folder
from fusion.telemetry.page import read_run, render
from tests.helpers import MINIMAL, runnable_checkpoint

CHUNKS = ("rollout.schedule.chunk_tokens=8", "rollout.kv_pool.suspended=pool", "rollout.kv_pool.pull_tokens=8")
SCHEDULES = {
    "fifo s=0": (0, ("rollout.schedule.order=fifo", "rollout.schedule.chunk_tokens=null")),
    "history s=0": (0, ("rollout.schedule.order=history", "rollout.schedule.chunk_tokens=null")),
    "history, chunks s=0": (0, ("rollout.schedule.order=history", *CHUNKS)),
    "HistoPipe s=1": (1, ("rollout.schedule.order=histopipe", "rollout.schedule.chunk_tokens=8")),
}
"""Staleness bound and overrides by name; all of them colocated"""
RATIOS = (
    ("RL Fusion (full) over separate", "full s=0", "separate s=0", "1.79 ×"),
    ("StaleSync (hybrid s=1) over separate", "hybrid s=1", "separate s=0", "2.5 ×"),
    ("StaleSync (hybrid s=1) over RL Fusion (full)", "hybrid s=1", "full s=0", "1.40 ×"),
    ("Seer: chunks and order over neither", "history, chunks s=0", "fifo s=0", "1.27–1.56 ×"),
    ("the order `history` alone, without chunks, over neither", "history s=0", "fifo s=0", ""),
    ("RhymeRL: HistoPipe, one step ahead, over synchronous", "HistoPipe s=1", "fifo s=0", "1.43 ×"),
)
"""Runs that are compared, and what is published: of RL Fusion and StaleSync (Pangu 718B on CloudMatrix 384), arXiv
2511.14617 and arXiv 2508.18588"""
DRAFTS = "RhymeRL: drafts over none, generation", "≤ 1.86 ×"
TOKENS_PER_S = {"separate s=0": "14,000", "full s=0": "25,000", "hybrid s=1": "35,000"}
"""Published by run: Pangu 718B on 384 packages"""
SIMULATED = """model=pangu_718b cluster=cloudmatrix384 stalesync.max_staleness=0,1 fusion=separate,full,hybrid
run.steps=8 algorithm.kl_coef=0.01 training.share_prefixes=off data.prompts_per_step=512 data.max_prompt_length=1024
rollout.max_response_length=16384 rollout.engine.max_seqs=64""".split()
NOTES = (
    "measured: a clock around real work. paced: whole runs with real processes, queue and switches, whose cards "
    "take modelled time. simulated: the run's decisions in virtual time, for Pangu 718B on CloudMatrix 384. "
    "input: chosen, not found out.",
    "No factor is fitted to a published ratio. Lengths of the published runs are not public.",
    "separate has the split at which its modelled work would be done first; what fits into HBM is not modelled.",
    "Chunks gain where a group stays on its engine otherwise, or KV runs short; here any free engine takes any "
    "request, KV suffices, and the milliseconds in which one returns count as often as a second has modelled ones.",
)

Cell = dict[str, str]
NONE: Cell = {"text": "–", "from": ""}


def measure(args: Arguments) -> Figures:
    if args.out:
        shutil.rmtree(args.out, ignore_errors=True)
    with nullcontext(Path(args.out)) if args.out else temporary_folder() as out:
        experts = dict(num_experts=args.cards, num_experts_per_tok=1, moe_intermediate_size=16)
        runnable_checkpoint(out / "model", experts=True, **MINIMAL | experts)
        workload = Workload(cards=args.cards, prompts=args.prompts, speed=args.speed)
        figures: Figures = {}
        work: Any = None
        for name, (mode, options) in _modes(args).items():
            if mode.fusion == "separate":
                mode = replace(mode, generating=work.best_split(ahead=mode.staleness > 0))
            measured = run(mode, workload, out, args.steps, options)
            work = work or measured
            split = {"generating": mode.generating} if mode.generating else {}
            figures[name] = measured.figures() | split | {"folder": str(measured.home / "run")}
        figures["drafts"] = real(args)
        if args.simulated:
            path = (out / "simulated.json").resolve()
            command = [sys.executable, "scripts/simulate.py", *SIMULATED, "--json", str(path)]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            rows = json.loads(path.read_text())["rows"]
            figures["simulated"] = {
                f"{one['deployment']} s={one['max_staleness']}": one["tokens_per_s"] for one in rows
            }
        write_page(figures, workload, out / "compare.html")
        print(f"page: {(out / 'compare.html').resolve()}", flush=True)
        return figures


def write_page(figures: Figures, workload: Workload, path: Path) -> None:
    """Write the page of the paced runs, whose folders the figures name, with the table."""
    paced = {name: one["folder"] for name, one in figures.items() if "folder" in one}
    runs = [read_run(folder, "stopped") | {"name": name} for name, folder in paced.items()]
    path.write_text(render(runs, comparison=table(figures, workload)), encoding="utf-8")


def _modes(args: Arguments) -> dict[str, tuple[Mode, Sequence[str]]]:
    """Return deployment and overrides of every paced run, by its name; `separate` last, without its split."""
    shared = (f"data.rows={args.prompts}",)
    modes: dict[str, tuple[Mode, Sequence[str]]] = {}
    for fusion in sorted(args.deployments, key="separate".__eq__):
        for bound in args.bounds:
            generating = args.cards // 2 if fusion == "hybrid" else None
            modes[f"{fusion} s={bound}"] = Mode(fusion, bound, generating), (*shared, "algorithm.kl_coef=0.01")
    for name, (bound, options) in SCHEDULES.items():
        if bound in args.bounds:
            modes[name] = Mode("colocated", bound), (*shared, *options)
    return modes


def table(figures: Figures, workload: Workload) -> dict[str, Any]:
    """Return the table of the page: what is published, what was found here, and what that rests on. Pure."""
    speed = {name: one["tokens_per_s"] for name, one in figures.items() if "tokens_per_s" in one}
    simulated: Mapping[str, float] = figures.get("simulated", {})
    lengths = _cell(f"lengths: median {workload.median} of at most {workload.cap} tokens; times of a card", "input")
    size = f"{workload.cards} dies of 910C under {workload.model}"
    rows: list[list[Cell]] = []

    def row(name: str, known: str, here: Cell, there: Cell, rests: Cell = lengths) -> None:
        rows.append([_cell(name), _cell(known, "published") if known else NONE, here, there, rests])

    def both(of: Callable[[Mapping[str, float]], str], *names: str) -> list[Cell]:
        sources = ((speed, "paced"), (simulated, "simulated"))
        return [_cell(of(rates), how) if {*names} <= rates.keys() else NONE for rates, how in sources]

    for name, one, other, known in RATIOS:
        row(name, known, *both(lambda rates: f"{rates[one] / rates[other]:.2f} ×", one, other))  # noqa: B023
    for live, drafts in figures.get("drafts", {}).items():
        rests = _cell(f"sequences of an engine: {live}; nine tenths of a text are known", "input")
        row(*DRAFTS, _cell(f"{drafts['ratio']:.2f} ×", "measured"), NONE, rests)
    for name in sorted({*speed, *simulated}):
        cells = both(lambda rates: f"{rates[name]:,.0f}", name)  # noqa: B023
        generating = figures.get(name, {}).get("generating")
        split = f", {generating} of which generate" if generating else ""
        row(f"tokens/s, {name}", TOKENS_PER_S.get(name, ""), *cells, _cell(size + split, "input"))
    overran = [name for name, one in figures.items() if one.get("pace_overrun", 0.0) > MAX_OVERRUN]
    late = f"Not valid, cards overran their time by more than {MAX_OVERRUN:.0%}: {', '.join(overran)}."
    header = ["", "published", "here", "at the published size", "rests on"]
    notes = [*NOTES, *([late] if overran else [])]
    return {"title": "Against what is published", "header": header, "rows": rows, "notes": notes}


def _cell(text: str, source: str = "") -> Cell:
    return {"text": text, "from": source}
