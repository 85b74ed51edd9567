"""Run chains of killed runs on several threads, and keep the account of their kills and faults."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.runs import make_base
from tests.chaos.chain import Result, run_chain
from tests.chaos.plan import DEPLOYMENTS, Chain, plan_chain
from tests.chaos.verdict import Ended, Verdict, differences, has_failed_rewards, judge
from tests.warm import Launcher

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
        kills: int = 1 << 20,
        only: int = -1,
        forks: Launcher | None = None,
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
        deployments = DEPLOYMENTS if self._only < 0 else [plan_chain(self._seed, self._only).deployment]
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
            chain = plan_chain(self._seed, number if self._only < 0 else self._only)
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
        enough = len(self.kills) >= self._max_kills
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
        reference = None if result.chain.converses else self._references.get(result.chain.deployment)
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


@contextmanager
def prepared(interpreters: bool) -> Iterator[tuple[Path, Launcher | None]]:
    """Make a tiny model in a new folder, and the process by which runs are started; None: as interpreters."""
    with tempfile.TemporaryDirectory(prefix="ch-", dir="/tmp") as name:  # short: Ray's sockets are below it
        make_base(Path(name) / "model", "addition", "--target", "0.05")
        make = f"from tests.stalesync import conversations; conversations.make_all({name!r})"
        subprocess.run([sys.executable, "-c", make], check=True)
        forks = None if interpreters or os.getuid() != 0 else Launcher()
        try:
            yield Path(name), forks
        except PermissionError as error:
            sys.exit(f"error: {error}")
        finally:
            if forks is not None:
                forks.end()


def chains(args: Namespace) -> dict[str, Any]:
    """Run chains until the time has passed or enough was killed; return the figures, every kill and every chain."""
    with prepared(args.interpreters) as (folder, forks):
        limits = {"minutes": args.minutes, "kills": args.kills, "only": args.chain}
        chaos = Chaos(seed=args.seed, folder=folder, forks=forks, **limits)
        chaos.run(args.jobs)
        return chaos.figures() | {"every_kill": chaos.kills, "every_chain": chaos.chains}
