"""Compare all combinations of trainer and engine in whole runs: what generation, training and a switch take in a step.

    python benchmarks/backends_runs.py --json runs.json [--rounds 3] [--steps 5]

In an environment with Megatron-Core and vLLM (bash scripts/environment.sh --backend vllm). The Qwen3-MoE of
benchmarks/backends.py in float32 on four emulated NPUs, trained in TP2 x EP2, generating in EP4, colocated at staleness
0. All runs have the same weights, prompts and forced lengths, so that they generate and train as many tokens; they take
turns. Figures are medians over the measured steps of all rounds; a run's first step warms up.

    gen_tokens_per_s     generated tokens per second of `timing_s/gen`
    train_s, switch_s    `timing_s/train`; `timing_s/switch`: to the engine's layout and back, with KV and optimizer
    reshard_s            of it, the resharding of the weights to the engine's layout
    peak_extra_buckets   how far weights and buffers of a switch exceed the larger of the two layouts, in buckets
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COMBINATIONS = [(trainer, engine) for trainer in ("embedded", "megatron") for engine in ("embedded", "vllm")]
FIGURES = ("gen_tokens_per_s", "train_s", "switch_s", "reshard_s", "peak_extra_buckets")
BUCKET_MIB = 2
WAIT_S = 900

WORKLOAD = [
    *("cluster=four", "device=emulated", "parallel=tp2ep2_ep4", f"fusion.bucket_bytes={BUCKET_MIB << 20}"),
    *("data=addition", "data.max_prompt_length=8", "data.prompts_per_step=16", "reward=arithmetic"),
    *("algorithm=grpo", "algorithm.group_size=8", "rollout.max_response_length=64", "rollout.forced_median=32"),
    *("run.eval_prompts=0", "run.save_every=0", "training.lr=1e-5"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    args = parser.parse_args()
    combinations = [pair for pair in COMBINATIONS if not missing(*pair)]
    for trainer, engine in COMBINATIONS:
        if lacking := missing(trainer, engine):
            print(f"{trainer} + {engine} is not measured: {lacking} is not installed")
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as home:
        make_model(Path(home, "model"))
        for number in range(args.rounds):
            turn = number % len(combinations)
            for trainer, engine in combinations[turn:] + combinations[:turn]:
                name = f"{trainer}+{engine}"
                found = run(Path(home), f"{number}-{name}", trainer, engine, args.steps)
                rows.setdefault(name, []).extend(found)
                print(f"round {number + 1}: {name} {summary(found)}", flush=True)
    figures = {name: summary(found) for name, found in rows.items()}
    print(f"{'':22}" + "".join(f"{figure:>20}" for figure in FIGURES))
    for name, values in figures.items():
        print(f"{name:22}" + "".join(f"{values[figure]:20.3f}" for figure in FIGURES))
    if args.json:
        args.json.write_text(json.dumps({"workload": WORKLOAD, "figures": figures}, indent=2) + "\n")


def missing(trainer: str, engine: str) -> str:
    """Return the package that a combination lacks here; "": none."""
    needs = {"megatron": trainer == "megatron", "vllm": engine == "vllm"}
    return next((name for name, needed in needs.items() if needed and importlib.util.find_spec(name) is None), "")


def make_model(folder: Path) -> None:
    """Save the model with random weights and the tokenizer of the addition task."""
    from benchmarks.backends_engines import write_model
    from stalesync.prompts import make_tokenizer

    folder.mkdir()
    write_model(folder, "float32")
    make_tokenizer(folder)


def run(home: Path, name: str, trainer: str, engine: str, steps: int) -> list[dict[str, float]]:
    """Run a combination; return the figures of its measured steps."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"model.path={home / 'model'}"]
    command += [f"run.dir={home}", f"run.name={name}", f"run.steps={steps + 1}"]
    command += [f"training.backend={trainer}", f"rollout.backend={engine}", *WORKLOAD]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = (home / name / "metrics.jsonl").read_text().splitlines()
    return [figures_of(row) for row in map(json.loads, lines[1:])]


def figures_of(row: dict[str, Any]) -> dict[str, float]:
    """Compute the figures of one step."""
    larger_mib = max(row["memory/train/weights_mib"], row["memory/infer/weights_mib"])
    return {
        "gen_tokens_per_s": row["rollout/generated_tokens"] / row["timing_s/gen"],
        "train_s": row["timing_s/train"],
        "switch_s": row["timing_s/switch"],
        "reshard_s": row["timing_s/switch/reshard"],
        "peak_extra_buckets": (row["switch/peak_mib_max"] - larger_mib) / BUCKET_MIB,
    }


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the figures."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in FIGURES}


if __name__ == "__main__":
    main()
