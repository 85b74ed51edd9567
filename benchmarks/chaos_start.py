"""End runs by a signal at every moment of their start, and check how they end.

    python benchmarks/chaos_start.py [--signals SIGINT,SIGTERM] [--every 0.05] [--until 6] [--victim NAME] [--json PATH]

A run of a tiny model is started for each moment and each signal, which is sent that long after the start of its
process, or of the victim's. The run must end within `LIMIT_S` of this machine when nothing else runs, with a message
that names the signal, or what was killed or full, without a traceback (`traced`), and must leave nothing
(`chaos_verdict.py`). Other victims than the controller are killed; `shared memory` and `disk` are filled.

Exit status 1 if a run did not end so, other than late. Needs root or user namespaces (`chaos_space.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.chaos_chain import overrides_of  # noqa: E402
from benchmarks.chaos_forks import Forks  # noqa: E402
from benchmarks.chaos_plan import FILLED, Chain, Kill  # noqa: E402
from benchmarks.chaos_run import StartedRun  # noqa: E402
from benchmarks.chaos_space import Space  # noqa: E402
from benchmarks.chaos_verdict import Ended  # noqa: E402

LIMIT_S = 8.0
CHAIN = Chain(-1, "colocated", bound=0, durability="memory", save_every="1", chunk_tokens=None, starts=((),))


def faults_of(ended: Ended) -> dict[str, bool]:
    """Return which faults the end of a run has."""
    return {
        "unnamed": bool(ended.unnamed),
        "left_over": bool(ended.left),
        "late": ended.seconds > LIMIT_S,
        "traced": ended.kill.victim == "controller" and "Traceback" in ended.err,
    }


def strike(space: Space, kill: Kill, *, model: Path) -> Ended | None:
    """Start a run and end it; None: it had ended before."""
    for path in space.seen(space.runs).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run = StartedRun(space, overrides_of(CHAIN, model=model, runs=space.runs), name="run", reference_s=LIMIT_S)
    try:
        if not run.await_moment(kill):
            return None
        struck, rank = run.strike(kill)
        return run.observe_end(kill, rank) if struck else None
    finally:
        space.clear(space.commands())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", default="SIGINT,SIGTERM", help="to the controller")
    parser.add_argument("--victim", default="controller", help="or raylet, gcs, queue, worker, shared memory, disk")
    parser.add_argument("--first", type=float, default=0.0, help="seconds of the first moment")
    parser.add_argument("--until", type=float, default=6.0, help="seconds of the last one")
    parser.add_argument("--every", type=float, default=0.05, help="seconds between two")
    parser.add_argument("--interpreters", action="store_true", help="start an interpreter for every process")
    parser.add_argument("--json", type=Path, help="write the figures and every end to this file")
    args = parser.parse_args()
    signals = args.signals.split(",") if args.victim == "controller" else ["" if args.victim in FILLED else "SIGKILL"]
    moments = [args.first + number * args.every for number in range(int((args.until - args.first) / args.every) + 1)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as name:  # short: Ray's sockets are below it
        folder = Path(name)
        make = [sys.executable, "scripts/make_base.py", "addition", str(folder / "model"), "--target", "0.05"]
        subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        forks = None if args.interpreters or os.getuid() != 0 else Forks()
        space = Space(folder / "space", forks)
        try:
            for moment_s, signal in ((moment_s, signal) for moment_s in moments for signal in signals):
                kill = Kill(args.victim, signal, step=None, delay_s=moment_s, pick=0.5, ends=True)
                if (ended := strike(space, kill, model=folder / "model")) is None:
                    continue
                faults = faults_of(ended)
                about = {"moment_s": round(moment_s, 3), "signal": signal, "status": ended.status}
                rows.append({**about, "seconds": round(ended.seconds, 2), "message": ended.message, **faults})
                marks = " ".join(name for name, there in faults.items() if there)
                print(
                    f"{kill}: {ended.seconds:.1f} s, status {ended.status}: {ended.message[:120]} {marks}", flush=True
                )
                if marks not in ("", "late"):
                    print(ended.unnamed, *ended.left, ended.err[-2000:], sep="\n")
        finally:
            space.close()
            if forks is not None:
                forks.close()
    seconds = sorted(row["seconds"] for row in rows)
    figures = {
        "runs": len(rows),
        **{name: sum(row[name] for row in rows) for name in ("unnamed", "left_over", "late", "traced")},
        "median_s": seconds[len(seconds) // 2] if seconds else None,
        "max_s": seconds[-1] if seconds else None,
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "ends": rows}, indent=2) + "\n")
    sys.exit(1 if any(figures[name] for name in ("unnamed", "left_over", "traced")) else 0)


if __name__ == "__main__":
    main()
