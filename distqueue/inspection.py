"""Inspect a queue: which readers and writers are waiting, for what, and for how long.

python -m distqueue                      # list the queues of the Ray clusters that you run on this machine
python -m distqueue samples              # show a live queue; --watch 2: every two seconds
python -m distqueue runs/run/queue       # show the queue in the folder of a journal or checkpoint
"""

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distqueue.clock import epoch_s
from distqueue.errors import QueueClosed
from distqueue.journal import is_journal, read_folder

LOOPBACK = "127.0.0.1"

ANSWER_S = 60.0
"""Seconds after which a Ray that does not answer is left out."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m distqueue", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "queue", nargs="?", help="name of a live queue, or folder of a journal or checkpoint; default: list live queues"
    )
    parser.add_argument(
        "--address", default="auto", help="address of the Ray cluster (default: all that you run on this machine)"
    )
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="repeat at this interval")
    args = parser.parse_args(arguments)
    try:
        while True:
            print(_report(args.queue, args.address), flush=True)
            if args.watch is None:
                return 0
            time.sleep(args.watch)
            print()
    except (ValueError, QueueClosed) as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # its reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _report(queue: str | None, address: str) -> str:
    if queue is not None and is_journal(queue):
        return state_text(journal_state(Path(queue)))
    heads = ray_heads() if address == "auto" and not _connected() else [address]
    if len(heads) > 1:
        return "\n\n".join(_reports_of(heads, queue))
    address = heads[0] if heads else address
    if address.startswith(f"{LOOPBACK}:"):
        # Ray would replace it by the machine's address in its network; a run starts its Ray with the user's token.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    from distqueue.client import DistQueue, live_queues

    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        wanted = "live queues" if queue is None else f"queue {queue!r} (not the folder of a journal)"
        raise ValueError(f"{wanted}: no Ray cluster at address={address!r}") from None
    if queue is not None:
        return state_text(DistQueue.connect(queue).state())
    names = live_queues()
    return "\n".join(["live queues:", *(f"  {name}" for name in names)]) if names else "no live queue"


def _connected() -> bool:
    """Whether this process has connected to a Ray; without importing Ray, which takes a second."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _reports_of(heads: Sequence[str], queue: str | None) -> list[str]:
    """Return the report of each Ray, of a queue only those that have it. Each is made by a process of its own, as a
    process connects to one Ray only.
    Raise ValueError: no Ray has the queue."""
    reports, errors = [], []
    for head in heads:
        command = [sys.executable, "-m", "distqueue", *([] if queue is None else [queue]), "--address", head]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            errors.append(f"Ray at {head}: no answer for {ANSWER_S:.0f} s")
            continue
        if done.returncode == 0:
            reports.append(f"Ray at {head}: {done.stdout.strip()}")
        else:
            errors.append(f"Ray at {head}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    if not reports:
        raise ValueError("\n".join(errors))
    return reports


def ray_heads(processes: Path = Path("/proc")) -> list[str]:
    """Return the addresses (`host:port`) of the Ray heads that this user runs on this machine."""
    heads = []
    for process in processes.glob("[0-9]*"):
        try:
            program, *arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if not program.endswith("/gcs_server") or process.stat().st_uid != os.getuid():
                continue
            options = dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)
            # The port is chosen by the server, which writes it here.
            port = Path(options["session-dir"], f"gcs_server_port_{options['node-id']}").read_text().strip()
            heads.append(f"{options['node-ip-address']}:{port}")
        except (OSError, KeyError):  # it has ended, has just begun, or is hidden
            continue
    return sorted(heads)


def journal_state(folder: Path) -> dict[str, Any]:
    """Read the state of a journal, in the form of `QueueCore.state`, without changing it. No sample in it is leased."""
    from distqueue.core import QueueCore  # loads numpy, which --help does not need

    stored = read_folder(folder)
    if stored.snapshot is None:
        raise ValueError(f"journal {folder}: it holds no state yet")
    core = QueueCore.recover(stored.snapshot, stored.events, has_gaps=bool(stored.missing))
    return core.state(epoch_s()) | {"name": "", "journal": str(folder), "damage": stored.damage}


def state_text(state: dict[str, Any]) -> str:
    """Format a state as a page for a terminal."""
    stats = state["stats"]
    title = f"queue {state['name']}" if state["name"] else "queue"
    storage = f"journal {state['journal']}" if state.get("journal") else "in memory"
    lines = [
        f"{title}: {stats['distqueue/rows']:,} samples, {_bytes(stats['distqueue/bytes'])}, {storage}"
        + (", sealed" if state["sealed"] else "")
    ]
    lines += ["", "task             to get    leased   oldest       redelivered  waiting"]
    for task in state["tasks"]:
        names = "depth", "leased", "age_s", "redelivered", "waiters"
        depth, leased, age_s, redelivered, waiters = (stats[f"distqueue/{task}/{name}"] for name in names)
        lines.append(f"{task:<14}{depth:>9,}{leased:>10,}{_seconds(age_s):>9}{redelivered:>18,}{waiters:>9,}")
    ended = {name.split("/", 2)[2]: count for name, count in stats.items() if name.startswith("distqueue/ended/")}
    lines += ["", "ended: " + (", ".join(f"{count:,} {name}" for name, count in sorted(ended.items())) or "none")]
    if stats["distqueue/late"]:
        lines.append(f"late: {stats['distqueue/late']:,} samples received a put after they had been dropped")
    for waiting in state["waiting"]:
        readers = "1 reader is" if waiting["waiters"] == 1 else f"{waiting['waiters']} readers are"
        lines.append(f"{readers} waiting, {_seconds(waiting['longest_s'])}: {waiting['why']}")
    lines += [f"a writer is waiting: {why}" for why in state["waiting_writers"]]
    if state["writing"]:
        lines.append(f"{state['writing']} puts are being written")
    lines += state.get("damage", [])
    lines += ["", "shard                        segments       bytes          of"]
    for shard in state["shards"]:
        held, max_bytes = _bytes(shard["bytes"]), _bytes(shard["max_bytes"])
        leaving = "  leaving" if shard["leaving"] else ""
        lines.append(f"{shard['name']:<26}{shard['segments']:>11,}{held:>12}{max_bytes:>12}{leaving}")
    if state["columns"]:
        lines.append("")
    for name, (kind, dtype, trailing, ragged) in state["columns"].items():
        shape = ", ".join([*(["L"] if ragged else []), *map(str, trailing)])
        lines.append(f"column {name}: {dtype if kind == 'tensor' else kind} ({shape})")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
