"""Measure DistQueue against its floor and its peers: one process puts, another gets; medians over alternating rounds.

    python benchmarks/distqueue.py --json PATH

    put_s, get_s        this queue; a get ends when the reader owns a copy of every byte
    put_sums_s, …       the part of it that computes checksums; get_sums_s: that verifies them
    hash_s              floor of both: xxh3 of the same bytes, one call per column
    copy_s              floor: np.copyto of the same bytes into warm memory
    call_s              floor: an empty call to an actor like the queue's; a put here is one call, ray.put is none
    ray_*               ray.put / ray.get of the same packed arrays, with the copy into warm memory
    transferqueue_*     TransferQueue 0.1.11 with its default storage, where it can be imported
    padded_bytes        size with every sample padded to the longest; payload_bytes: the samples themselves
    sent_bytes          bytes this queue sends for a put, metadata included, counted at the sender; received_bytes: for
                        a get

Workloads: `long`, 512 samples of lognormal lengths (mean about 5.6k, at most 32k); `short`, 8,192 samples of 10 to 300
tokens; five columns of 4 bytes per token each. Then what the queue's own processes cost a node, requests and bytes of
the hierarchical reader, and the sample table with a million rows. TransferQueue pins its requirements: to include it,
use an environment with TransferQueue, torch, numpy, ray, lazy_loader, xxhash and safetensors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, help="rounds of the transfer (default: 15)")
    parser.add_argument("--only", choices=["transfer", "processes", "hierarchy", "metadata"], help="run only this part")
    args = parser.parse_args()
    if args.rounds is not None and args.only not in (None, "transfer"):
        parser.error(f"--rounds has no effect with --only {args.only}: it is of the transfer")
    figures: dict[str, Any] = {}
    if args.only in (None, "transfer"):
        from benchmarks.distqueue_transfer import measure as measure_transfer

        figures |= measure_transfer(args.rounds or 15)
    if args.only in (None, "processes"):
        from benchmarks.distqueue_processes import measure as measure_processes

        figures["processes"] = measure_processes()
        print("processes:", json.dumps({name: round(value, 2) for name, value in figures["processes"].items()}))
    if args.only in (None, "hierarchy"):
        from benchmarks.distqueue_ranks import measure as measure_hierarchy

        figures["hierarchy"] = measure_hierarchy()
        print("hierarchy:", json.dumps(figures["hierarchy"]))
    if args.only in (None, "metadata"):
        from benchmarks.distqueue_metadata import measure as measure_metadata

        figures["metadata"] = measure_metadata()
        print("metadata:", json.dumps(figures["metadata"]))
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=2))


if __name__ == "__main__":
    main()
