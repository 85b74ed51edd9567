"""End runs by a signal at every moment of their start, and check how they end.

The run must end within `LIMIT_S` of this machine when nothing else runs, with a message that names the signal, or what
was killed or full, without a traceback (`traced`), and must leave nothing (`tests/chaos/verdict.py`).
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.chaos.account import prepared
from tests.chaos.chain import overrides_of
from tests.chaos.plan import FILLED, Chain, Kill
from tests.chaos.run import StartedRun
from tests.chaos.space import Space
from tests.chaos.verdict import Ended

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


def measure(args: Namespace) -> dict[str, Any]:
    """Start a run for each moment and each signal, which is sent that long after the start of its process, or of the
    victim's; return the figures and every end."""
    signals = args.signals.split(",") if args.victim == "controller" else ["" if args.victim in FILLED else "SIGKILL"]
    moments = [args.first + number * args.every for number in range(int((args.until - args.first) / args.every) + 1)]
    rows: list[dict[str, Any]] = []
    with prepared(args.interpreters) as (folder, forks):
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
                what = f"{ended.seconds:.1f} s, status {ended.status}: {ended.message[:120]} {marks}"
                print(f"{kill}: {what}", flush=True)
                if marks not in ("", "late"):
                    print(ended.unnamed, *ended.left, ended.err[-2000:], sep="\n")
        finally:
            space.close()
    seconds = sorted(row["seconds"] for row in rows)
    return {
        "runs": len(rows),
        **{name: sum(row[name] for row in rows) for name in ("unnamed", "left_over", "late", "traced")},
        "median_s": seconds[len(seconds) // 2] if seconds else None,
        "max_s": seconds[-1] if seconds else None,
        "every_end": rows,
    }
