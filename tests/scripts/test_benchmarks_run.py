"""Every part of every benchmark runs at toy size, from its command line to its figures in a file.

Sizes are toy sizes, so no figure means anything: only that it is there, and is a number.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.harness import leaves
from tests import machine

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "\nBENCHMARK = " in path.read_text())
BENCHMARKS = {path.stem: importlib.import_module(f"benchmarks.{path.stem}").BENCHMARK for path in ENTRIES}
PARTS = [(name, part) for name, benchmark in BENCHMARKS.items() for part in benchmark.parts]
READS_WHEELS = ("launches", "contracts")
"""The part that needs what `bash scripts/test.sh contracts` downloads"""

WANTED = {
    "backends": {"embedded.gen_tokens_per_s"},
    "card operators": {"copy_gb_per_s", "experts.over_floor", "varlen_attention.seconds"},
    "card decode": {"over_floor", "layer_us", "tokens_per_s"},
    "card step": {"layer.kernels", "layer.call_us", "outside.card_us"},
    "card train": {"over_floor", "tokens_per_s"},
    "card switch": {"offload.over_floor", "floor.gb_per_s"},
    "chaos chains": {"kills", "lost", "twice", "too_old", "not_bitwise", "left_over", "unnamed", "late"},
    "chaos start": {"runs", "unnamed", "left_over", "max_s"},
    "compare": {"separate s=0.generating", "full s=0.pace_overrun", "fifo s=0.tokens_per_s", "drafts.1.ratio"},
    "distqueue": {
        "long.put_s",
        "long.ray_put_s",
        "long.copy_s",
        "short.sent_over_payload",
    },
    "drafts engines": {
        "siblings_1.tokens_per_forward",
        "both_4_exchange.bytes_per_token",
        "history_2_exchange.store_us",
    },
    "drafts texts": {"tuned.siblings.tokens_per_forward", "held_out.both.tokens_per_forward", "held_out.both.accepted"},
    "drafts real": {"1.ratio", "2.accepted"},
    "drafts small": {"8.ratio", "64_unlike.epoch_3"},
    "drafts paced": {"steps"},
    "engine": {"qwen3_moe.equal.ratio_to_hf", "qwen3_moe.ragged.floor_tokens_per_s"},
    "environments pool": {"waiting_mb", "turning_core", "floor_mb"},
    "environments zero_latency": {"ratio", "single.tokens_per_s", "several.overrun"},
    "environments latency": {"occupancy", "restored", "overrun"},
    "environments kv": {"restored", "restored_at_once"},
    "growth controller": {"staleness 0, 16.us_a_group", "staleness 1, 64.queue_calls"},
    "growth queue": {"1,000 held.put_samples_per_s", "5,000 held.bytes_per_sample"},
    "growth memory": {"folder_bytes_a_step"},
    "kv_pool requests": {"pull_ms", "prefill_over_remote_pull", "floor_wire_ms"},
    "kv_pool prompts": {"hit_over_memcpy", "whole_over_memcpy", "memcpy_ms", "first_token_ms", "prefill_ms"},
    "launches contracts": {"checked", "failed"},
    "launches decode": {"cuda.tp1", "ascend.tp2ep2", "ascend.host_syncs"},
    "launches decode_mla": {"cuda.tp1", "ascend.tp2ep2", "ascend.host_syncs"},
    "launches train": {
        "cuda.tp1",
        "ascend.tp2ep2_recompute",
        "ascend.host_syncs",
        "ascend.host_syncs_tp2ep2",
        "ascend.host_syncs_tp2ep2_replay",
    },
    "launches logprobs": {"peak_bytes", "planned_bytes", "whole_bytes"},
    "learning staleness": {"0.final", "1.difference"},
    "learning deployments": {"hybrid.0.final", "separate.1.difference"},
    "learning quickstart": {"colocated.mean_end", "colocated 0.command_s"},
    "lora": {"switch.ratio", "hbm.ratio", "step.ratio", "decode.ratio"},
    "offload": {"floor.seconds", "offload.ratio", "stream.gb_per_s"},
    "planning": {
        "to_infer.planners",
        "to_infer.cpu_s",
        "to_infer.part_kb",
        "to_train.part_cpu_s",
        "to_infer.over_bound",
        "to_train.busiest",
        "to_train.missing",
    },
    "overlap": {"overlap.hidden_share", "overlap.switch.both_s", "overlap.training.hidden_share"},
    "rhyme_run": {"both.generation_ratio", "both.step_ratio", "both.share", "both.equal_samples"},
    "rollout orders": {"even, 1% runaways, epoch 2.history.ratio_to_oracle"},
    "rollout replay": {"moonlight.full.ratio", "moonlight.seer.published", "moonlight.perfect_balance"},
    "rollout rhyme": {"full_s2.ratio", "two_tier.deviation", "full_over_histospec"},
    "shared_prefix": {"n8.ratio", "n8.floor", "short.ratio", "short.shared_rows_share"},
    "stalesync": {"fusion_gain", "total_gain", "colocated_s0.ratio_to_bound", "hybrid_s1.stale_beyond_bound"},
    "switch": {"TP2PP2->EP4.ratio_to_floor", "EP4->TP2PP2.extra_buckets"},
    "trl": {"rlfusion_step_s"},
}
"""Figures that docs/figures.md states, by benchmark and part"""


def test_every_part_has_figures_that_are_looked_for():
    assert {f"{name} {part}".strip() for name, part in PARTS} == WANTED.keys()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(*one, marks=getattr(pytest.mark, "contracts" if one == READS_WHEELS else "extended"))
        for one in PARTS
    ],
    ids=lambda one: one or "all",
)
def test_a_benchmark_runs_at_toy_size(name, part, tmp_path):
    only = ["--only", part] if part else []
    command = [sys.executable, f"benchmarks/{name}.py", "--smoke", "--json", str(tmp_path / "figures.json"), *only]
    done = machine.run(command, 120, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if part in ("chains", "start") and "no namespace" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    result = json.loads((tmp_path / "figures.json").read_text())
    assert result["smoke"] and result["machine"]["commit"]
    figures = dict(leaves(result["figures"][part] if part else result["figures"]))
    assert WANTED[f"{name} {part}".strip()] <= figures.keys(), sorted(figures)
    assert all(isinstance(figures[path], (int, float)) for path in WANTED[f"{name} {part}".strip()])
