"""Measure conversations that are away in a process of a pool. The file is also the environment that they have."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusion.environments import EnvironmentConfig, EnvPool, Message, StepOrder, Task, Turn

MB = 1 << 20
SLEEPERS = """
import asyncio, sys

async def main(count):
    print(open("/proc/self/statm").read().split()[1], flush=True)
    tasks = [asyncio.create_task(asyncio.sleep(600)) for _ in range(count)]
    await asyncio.sleep(0.1)
    print(open("/proc/self/statm").read().split()[1], flush=True)

asyncio.run(main(int(sys.argv[1])))
"""
"""A process that has nothing but sleeping tasks"""


class Waiting:
    """Answers each turn after the seconds that the turn's text names; the answer is the process's id."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return task.messages

    async def step(self, message: Message) -> Turn:
        await asyncio.sleep(float(message["content"]))
        return Turn([{"role": "user", "content": str(os.getpid())}])

    async def close(self) -> None: ...


class Conversations:
    """Keeps conversations of a pool going, as a controller does."""

    def __init__(self, pool: EnvPool, news: threading.Semaphore, count: int) -> None:
        self._pool, self._news = pool, news
        self._task = Task("How long?", "")
        (started,) = pool.reset([(self._task, 0)])
        assert not started.failure, started.detail
        self._actions: list[tuple[str, ...]] = [()] * count
        self._observed = [(started.digest,)] * count
        self.num_ended = 0

    def step(self, number: int, text: str) -> None:
        self._actions[number] += (text,)
        self._pool.begin(StepOrder(str(number), self._task, 0, self._actions[number], self._observed[number]))

    def take(self, then: Callable[[int], None], until_s: float) -> str:
        """Follow each reply by ``then`` until the time; return the content of the last one."""
        content = ""
        while (left_s := until_s - time.monotonic()) > 0:
            self._news.acquire(timeout=left_s)
            for stepped in self._pool.poll():
                assert stepped.turn is not None, stepped
                self.num_ended += 1
                content = stepped.turn.messages[0]["content"]
                self._observed[int(stepped.id)] += (stepped.digest,)
                then(int(stepped.id))
        return content


def away(args: Any) -> dict[str, float]:
    from benchmarks.harness import resident_bytes  # the pool's process imports this file, and its memory is a figure

    news, count, limits = threading.Semaphore(0), args.conversations, dict(step_timeout_s=3600, episode_timeout_s=36000)
    config = EnvironmentConfig(name="custom", path=f"{__file__}:Waiting", workers=1, **limits)
    with EnvPool(config, news.release) as pool:
        one = Conversations(pool, news, 1)
        one.step(0, "0")
        pid = int(one.take(lambda _: None, time.monotonic() + 1))
        pool.end(["0"])
        idle = resident_bytes(pid), resident_bytes()
        figures: dict[str, float] = {"idle_mb": idle[0] / MB}
        figures["idle_core"] = core_share(pid, lambda: time.sleep(args.seconds / 3))
        all_of_them = Conversations(pool, news, count)
        for number in range(count):
            all_of_them.step(number, "0")
        all_of_them.take(lambda _: None, time.monotonic() + max(2.0, count / 200))
        assert all_of_them.num_ended == count
        for number in range(count):
            all_of_them.step(number, str(args.seconds + 5))
        time.sleep(2)
        figures["waiting_core"] = core_share(pid, lambda: time.sleep(args.seconds))
        figures["waiting_mb"] = (resident_bytes(pid) + resident_bytes() - sum(idle)) / MB

        def again(number: int) -> None:
            # Spread over the latency: all of them have waited equally long.
            spread = (number % 100) / 100 if all_of_them.num_ended <= 2 * count else 0
            all_of_them.step(number, str(args.latency_s * (1 + spread)))

        all_of_them.take(again, time.monotonic() + 5 + 2 * args.latency_s)
        before, started = all_of_them.num_ended, time.monotonic()
        figures["turning_core"] = core_share(pid, lambda: all_of_them.take(again, started + args.seconds))
        figures["turning_steps_per_s"] = (all_of_them.num_ended - before) / (time.monotonic() - started)
        figures["turning_mb"] = (resident_bytes(pid) + resident_bytes() - sum(idle)) / MB
    done = subprocess.run([sys.executable, "-c", SLEEPERS, str(count)], capture_output=True, text=True, check=True)
    before, after = (int(line) * os.sysconf("SC_PAGE_SIZE") / MB for line in done.stdout.split())
    return figures | {"floor_mb": after - before}


def core_share(pid: int, work: Callable[[], object]) -> float:
    """Return the share of a core that this process and another use during the work."""

    def cpu_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    used, started = cpu_s(), time.monotonic()
    work()
    return (cpu_s() - used) / (time.monotonic() - started)
