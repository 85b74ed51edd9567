"""Kill processes of runs at random moments, and check what the runs leave.

    python benchmarks/chaos.py [--minutes 30] [--seed 0] [--jobs 2] [--kills N] [--json PATH]

Runs of a tiny model are started as a user starts them, in every deployment at staleness 0, 1 and 2, and something is
killed in each: the controller (SIGKILL, SIGTERM, SIGINT), a worker, the queue, a shard of it, Ray's raylet or GCS, a
reward process; or the disk or the shared memory becomes full. A disk that is full between two checkpoints must only
stop the run's logs, with a warning, until there is space again. The run is resumed, killed again, and so on; the last
start goes to its end. What is killed when is drawn from the seed (`chaos_plan.py`).

After each kill the run must end, or go on where it survives, within 1.5 times the time in which it starts on this
machine under its present load (else `late`); its message must name what was killed, for a worker with rank and stage
(`unnamed`); and no process, segment of shared memory or temporary file may be left over, and no checkpoint count as
complete that is not (`left_over`). A run that goes on without a worker, because its engine is replaced, counts as
`mended`; its controller is killed then. After a chain, its folder must show every group ended once (`lost`, `twice`)
at an age within the bound (`too_old`), and at staleness 0 the metrics and final weights of a run that was not
disturbed, to the bit (`not_bitwise`; of a step in which an engine was replaced, without what engines count);
`not_finished` counts chains whose last start failed. Where groups are in progress after a kill, the run is first
resumed under another setting, which must be refused by key and change no file (`not_refused`). Between two starts a
file beside the checkpoint is damaged: a resume must name it (`unnamed_flips`), and the run must end as if it had not
been, apart from rows that were dropped. A chain in which a
reward process was killed while it scored a sample is not compared: that sample is not trained.

Exit status 1 if any of these but `late` is not 0. Needs root or user namespaces (`chaos_space.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.chaos_chain import Result, run_chain  # noqa: E402
from benchmarks.chaos_forks import Forks  # noqa: E402
from benchmarks.chaos_plan import DEPLOYMENTS, Chain, plan_chain  # noqa: E402
from benchmarks.chaos_verdict import Ended, Verdict, differences, has_failed_rewards, judge  # noqa: E402

FAULTS = (
    "lost",
    "twice",
    "too_old",
    "not_bitwise",
    "not_finished",
    "not_refused",
    "unnamed_flips",
    "left_over",
    "unnamed",
)
"""Figures that must be 0"""
START_S = 15.0
"""Seconds in which a run starts, until an undisturbed one has been measured"""


class Chaos:
    """Runs chains on several threads until the time has passed or enough was killed, and keeps the account."""

    def __init__(
        self,
        *,
        seed: int,
        minutes: float,
        folder: Path,
        kills: int | None = None,
        only: int | None = None,
        forks: Forks | None = None,
    ) -> None:
        self._seed, self._max_kills, self._folder, self._forks, self._only = seed, kills, folder, forks, only
        self._begin_s, self._seconds = time.monotonic(), 60 * minutes
        self._lock, self._next = threading.Lock(), 0
        self._references: dict[str, Result] = {}
        self.kills: list[dict[str, Any]] = []
        self.chains: list[dict[str, Any]] = []
        self.faults: Counter[str] = Counter()

    def run(self, jobs: int) -> None:
        """Run the undisturbed run of each deployment, then chains, ``jobs`` at a time."""
        deployments = DEPLOYMENTS if self._only is None else [plan_chain(self._seed, self._only).deployment]
        with ThreadPoolExecutor(jobs) as pool:
            for reference in pool.map(self._reference, deployments):
                self._references[reference.chain.deployment] = reference
            for worker in [pool.submit(self._work) for _ in range(jobs)]:
                worker.result()

    @property
    def start_s(self) -> float:
        """Seconds in which an undisturbed run starts."""
        starts = [reference.start_s for reference in self._references.values()]
        return sum(starts) / len(starts) if starts else START_S

    def figures(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "kills": len(self.kills),
            "mended": sum(kill["mended"] for kill in self.kills),
            **{name: self.faults[name] for name in (*FAULTS, "late")},
            "chains": sum(chain["chain"] >= 0 for chain in self.chains),
            "changed_resumes": sum(chain["changed_resumes"] for chain in self.chains),
            "flips": sum(len(chain["flips"]) for chain in self.chains),
            "compared_bitwise": sum(chain["compared"] for chain in self.chains),
            "minutes": round((time.monotonic() - self._begin_s) / 60, 1),
            "start_s": round(self.start_s, 1),
            "kills_by_victim": dict(Counter(kill["victim"] for kill in self.kills).most_common()),
        }

    def _reference(self, deployment: str) -> Result:
        chain = Chain(-1, deployment, bound=0, durability="memory", save_every="1", chunk_tokens=None, starts=((),))
        folder, model = self._folder / deployment[0], self._folder / "model"
        result = run_chain(chain, folder, model=model, reference_s=START_S, forks=self._forks)
        faults = self._account(result)
        if result.failed or faults:
            raise RuntimeError(f"{deployment}, not disturbed: {result.failed}\n" + "\n".join(faults))
        self._say(f"{deployment}, not disturbed: its first step ended after {result.start_s:.1f} s")
        return result

    def _work(self) -> None:
        while not self._stopping():
            with self._lock:
                number, self._next = self._next, self._next + 1
            chain = plan_chain(self._seed, number if self._only is None else self._only)
            result = run_chain(
                chain,
                self._folder / str(number),
                model=self._folder / "model",
                reference_s=self.start_s,
                forks=self._forks,
                stopping=self._stopping,
                note=self._note,
            )
            self._close(result)

    def _stopping(self) -> bool:
        enough = self._max_kills is not None and len(self.kills) >= self._max_kills
        return enough or time.monotonic() - self._begin_s > self._seconds

    def _note(self, chain: Chain, ended: Ended) -> None:
        """Add a kill to the account."""
        row = {
            "chain": chain.index,
            "deployment": chain.deployment,
            "s": chain.bound,
            "durability": chain.durability,
            "victim": ended.kill.victim,
            "signal": ended.kill.signal,
            "step": ended.kill.step,
            "delay_s": round(ended.kill.delay_s, 3),
            "rank": ended.rank,
            "seconds": round(ended.seconds, 2),
            "limit_s": round(ended.limit_s, 1),
            "status": ended.status,
            "message": "goes on" if ended.status == 0 and not ended.kill.ends else ended.message[:300],
            "mended": ended.mended,
            "late": ended.late,
            "unnamed": ended.unnamed,
            "left_over": list(ended.left),
        }
        faults = [f"unnamed: {ended.unnamed}"] * bool(ended.unnamed) + [f"left over: {one}" for one in ended.left]
        with self._lock:
            self.kills.append(row)
            self.faults.update(unnamed=bool(ended.unnamed), late=ended.late, left_over=len(ended.left))
            number = len(self.kills)
        late = " LATE" if ended.late else ""
        what = f"{chain.name}: {ended.kill}: {ended.seconds:.1f} s{late}: {row['message']}"
        self._say(f"{number:3d} chain {chain.index} {what}", *faults)

    def _close(self, result: Result) -> None:
        """Add a chain to the account."""
        chain, faults = result.chain, self._account(result)
        how = f"{len(result.ends)} kills; {'compared to the bit' if result.compared else 'to its end'}"
        self._say(f"    chain {chain.index} {chain.name}: {how}: {'FAULTS' if faults else 'all there, once'}", *faults)

    def _account(self, result: Result) -> list[str]:
        """Judge a chain, add it to the account, and return a line for each fault."""
        verdict = judge(result.remains) if result.remains is not None else Verdict()
        reference = self._references.get(result.chain.deployment)
        if result.remains is not None and reference is not None and result.chain.bound == 0:
            assert reference.remains is not None
            if not has_failed_rewards(result.remains.metrics):
                result.compared = True
                verdict.not_bitwise = differences(
                    result.remains.metrics,
                    result.weights,
                    of_metrics=reference.remains.metrics,
                    of_weights=reference.weights,
                )
        lines = {
            "lost": verdict.lost,
            "twice": verdict.twice,
            "too_old": verdict.too_old,
            "not_bitwise": verdict.not_bitwise,
            "not_finished": [result.failed] if result.failed else [],
            "not_refused": result.not_refused,
            "unnamed_flips": result.unnamed_flips,
            "left_over": list(result.left),
        }
        with self._lock:
            self.faults.update({name: len(found) for name, found in lines.items()})
            self.chains.append(
                {
                    "chain": result.chain.index,
                    "deployment": result.chain.deployment,
                    "s": result.chain.bound,
                    "durability": result.chain.durability,
                    "kills": len(result.ends),
                    "compared": result.compared,
                    "changed_resumes": result.num_changed,
                    "flips": result.flips,
                    **lines,
                }
            )
        return [f"{name}: {line}" for name, found in lines.items() for line in found]

    def _say(self, *lines: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begin_s), 60)
        with self._lock:
            print(f"{minutes:2d}:{seconds:02d} {lines[0]}", *(f"            !! {line}" for line in lines[1:]), sep="\n")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes after which nothing more is killed")
    parser.add_argument("--seed", type=int, default=0, help="determines what is killed in which run, and when")
    parser.add_argument("--jobs", type=int, default=2, help="number of chains that run at a time")
    parser.add_argument("--chain", type=int, help="run this chain of the seed again and again, instead of all")
    parser.add_argument("--kills", type=int, help="end after this many kills")
    parser.add_argument(
        "--interpreters", action="store_true", help="start an interpreter for every process, instead of forking it"
    )
    parser.add_argument("--json", type=Path, help="write the figures, every kill and every chain to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ch-", dir="/tmp") as name:  # short: Ray's sockets are below it
        folder = Path(name)
        make = [sys.executable, "scripts/make_base.py", "addition", str(folder / "model"), "--target", "0.05"]
        subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        forks = None if args.interpreters or os.getuid() != 0 else Forks()
        limits = {"minutes": args.minutes, "kills": args.kills, "only": args.chain}
        chaos = Chaos(seed=args.seed, folder=folder, forks=forks, **limits)
        try:
            chaos.run(args.jobs)
        except PermissionError as error:
            sys.exit(f"error: {error}")
        finally:
            if forks is not None:
                forks.close()
            figures = chaos.figures()
            print(json.dumps(figures, indent=2))
            if args.json:
                result = {"seed": args.seed, "figures": figures, "kills": chaos.kills, "chains": chaos.chains}
                args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(1 if any(figures[name] for name in FAULTS) else 0)


if __name__ == "__main__":
    main()
