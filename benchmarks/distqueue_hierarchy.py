"""Measure what reading once per replica saves: eight processes in TP2 PP2 DP2 share one queue.

    python benchmarks/distqueue_hierarchy.py [--batches 8] [--json hierarchy.json]

flat: every rank requests the columns of its pipeline stage. leader: one rank of a replica requests the columns that any
of its ranks needs and broadcasts them along a tree. Requests and bytes are those exchanged between the ranks' handles
and the queue, metadata included; floor_bytes is the payload of every batch, once per replica, and group_bytes what the
ranks sent each other. Response lengths are lognormal, about 1.6k tokens on average; prompts have 32 to 512.

The keys with tp8_pp16 are computed, not measured: the requests of 16 replicas of 128 ranks, and the payload that the
queue sends them for the same samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    from benchmarks.distqueue_ranks import LARGE, LAYOUT, SAMPLES, measure  # only now: --help must not wait for torch

    figures = measure(args.batches)
    print(f"{args.batches} batches of {SAMPLES} samples for each of {LAYOUT.dp} replicas, TP2 PP2")
    for what in ("requests", "bytes"):
        flat, leader = figures[f"{what}_flat"], figures[f"{what}_leader"]
        print(f"{what:9} flat {flat:14,} leader {leader:14,}   1/{flat / leader:.3f}")
    print(f"{'floor':9} {figures['floor_bytes']:,} bytes; sent within the groups {figures['group_bytes']:,}")
    flat, leader = figures["requests_flat_tp8_pp16"], figures["requests_leader_tp8_pp16"]
    print(f"TP8 PP16 DP{LARGE.dp}, computed: requests flat {flat:,}, leader {leader:,}, 1/{flat // leader}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
