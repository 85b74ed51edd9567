"""Measure the KV pool: a request that moves between two engines by copying, on one machine and between two, against
prefilling it again.

    python benchmarks/kv_pool.py [--tokens 1024] [--json PATH]

park: the request leaves the first engine, its KV is copied to a file. pull: from the submission to the second engine
until its next token is sampled; of that, fetch: reading and verifying the file. prefill: the same where all tokens are
computed again. step: a decode step of this request, without which no engine continues it. remote_pull, remote_fetch:
the same where the file is on another node of a Ray cluster, both on this machine: the bytes pass between the stores of
two raylets over loopback. Floors: memcpy of as many bytes, a TCP connection over loopback (wire), and their checksum. A
small dense model on one emulated card; median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    sys.path.remove(str(Path(__file__).resolve().parent))  # its `distqueue.py` is not the package
    # Before Ray is imported, which reads it then: its two nodes talk over this machine's address.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import torch

    from benchmarks.kv_pool_engines import measure

    torch.set_num_threads(1)
    found = measure(options.tokens)
    for name, value in found.items():
        print(f"{name:24} {value:10.2f}")
    if options.json:
        options.json.write_text(json.dumps({"figures": {"kv_pool": found}}, indent=1))


if __name__ == "__main__":
    main()
