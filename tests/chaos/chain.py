"""Run a chain: its starts with their kills, the last one to its end; collect what its folder holds then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from fusion.telemetry.run_contents import GROUPS, METRICS, complete_checkpoints
from stalesync.job import savepoint
from stalesync.job.savepoint import groups_in_progress
from tests.chaos.flips import Flip, strike, with_dropped
from tests.chaos.plan import SELDOM, STEPS, Chain, Kill
from tests.chaos.run import StartedRun
from tests.chaos.space import Space
from tests.chaos.verdict import Ended, Remains
from tests.warm import Launcher

COMMON = """device=emulated cluster.npus=2 parallel=single data=addition data.max_prompt_length=8
data.prompts_per_step=8 algorithm.group_size=4 training.lr=1e-3 reward.max_failed_share=1
run.name=run run.resume=auto""".split()

CONVERSES = """environment=custom reward=environment data.max_prompt_length=16
rollout.max_response_length=100 rollout.engine.batch_invariant=true""".split()
"""Of chains whose model speaks in several turns"""

EVALUATED = """run.eval_prompts=8 eval.best=val-core/held_out/reward/mean@1""".split()
"""Of chains that are not compared with an undisturbed run, which has no evaluations"""
EVAL_EVERY = 6
"""Steps between evaluations, of which the best is saved; where the disk is to be full between checkpoints, SELDOM"""

CHANGED = (
    ("algorithm.group_size", "2"),
    ("stalesync.max_staleness", "0"),
    ("rollout.max_response_length", "12"),
    ("rollout.sampling.stop", "[7]"),
    ("data.prompts_per_step", "4"),
)
"""Settings under which groups in progress cannot go on: a resume must refuse them by key"""

NOTHING = Kill("", "", None, 0.0, 0.0, ends=False)
"""Of a run that ends by itself"""

Note = Callable[[Chain, Ended], None]


@dataclass
class Result:
    """What came of a chain.

    Attributes:
        failed: why the last start did not go to its end; "": it did. Without that, there are no remains.
        left: what is left over after it.
        weights: digests of the exported files by name.
        start_s: seconds in which the last start ended its first step.
        compared: whether it was compared with the undisturbed run.
        num_changed: resumes under another setting; not_refused: those that were not refused as they must.
        flips: files that were damaged between two starts; unnamed_flips: those that no resume named.
        dropped: rows of these that resumes dropped, by file.
    """

    chain: Chain
    ends: list[Ended] = field(default_factory=list)
    failed: str = ""
    left: tuple[str, ...] = ()
    remains: Remains | None = None
    weights: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    compared: bool = False
    num_changed: int = 0
    not_refused: list[str] = field(default_factory=list)
    flips: list[str] = field(default_factory=list)
    unnamed_flips: list[str] = field(default_factory=list)
    dropped: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def overrides_of(chain: Chain, *, model: Path, runs: Path) -> list[str]:
    """Return the arguments of every start of a chain. Above staleness 0, responses are long enough that training
    suspends some."""
    longer = ["rollout.max_response_length=24", "rollout.sampling.forced_median=6"]
    every = SELDOM if chain.save_every == f"{SELDOM}" else EVAL_EVERY
    told = [*EVALUATED, f"eval.every={every}"] if chain.bound else ["run.eval_prompts=0"]
    if chain.converses:
        path = model.parent / "env.py"
        longer = [*CONVERSES, f"environment.path={path}:Slow"]
        model = model.parent / "chatting"
    replaces = chain.deployment in ("separate", "hybrid")  # engines, whose requests are generated in other batches then
    return [
        *COMMON,
        *(
            [*longer, *told]
            if chain.bound or chain.converses
            else ["rollout.max_response_length=5", "run.eval_prompts=0"]
        ),
        f"model.path={model}",
        f"run.dir={runs}",
        f"run.steps={STEPS}",
        f"run.save_every={chain.save_every}",
        f"fusion={chain.deployment}",
        f"algorithm.kl_coef={0.01 if chain.deployment == 'full' else 0.0}",
        f"stalesync.max_staleness={chain.bound}",
        f"queue.durability={chain.durability}",
        *(["rollout.engine.batch_invariant=true"] if replaces and not chain.converses else []),
        *([f"rollout.schedule.chunk_tokens={chain.chunk_tokens}"] if chain.chunk_tokens else []),
    ]


def run_chain(
    chain: Chain,
    folder: Path,
    *,
    model: Path,
    reference_s: float,
    forks: Launcher | None = None,
    stopping: Callable[[], bool] = lambda: False,
    note: Note = lambda chain, ended: None,
) -> Result:
    """Run a chain in a new folder, which is removed.

    Args:
        reference_s: seconds in which an undisturbed run starts.
        forks: by which runs are started; None: as interpreters of their own.
        stopping: whether to go to the end without further kills.
        note: called after each kill.
    """
    result, space = Result(chain), Space(folder, forks)
    try:
        arguments, flip = overrides_of(chain, model=model, runs=space.runs), None
        for number, kills in enumerate(chain.starts, start=1):
            run = StartedRun(space, arguments, name="run", reference_s=reference_s)
            for kill in () if stopping() else kills:
                for ended in execute(run, kill):
                    result.ends.append(ended)
                    note(chain, ended)
            status = run.wait_for_end()
            finishes = status == 0 or number == len(chain.starts)
            if flip is not None:
                flip = _judge_flip(result, flip, run.describe(NOTHING, status), finishes)
            if finishes:
                _collect(result, run)
                return result
            space.clear(space.commands())
            _resume_changed(result, space, arguments, reference_s)
            if flip is None and (flip := strike(space.seen(space.runs / "run"), Random(kills[-1].pick))):
                result.flips.append(flip.name)
        raise AssertionError("a chain has a last start")
    finally:
        space.close()


def execute(run: StartedRun, kill: Kill) -> Iterator[Ended]:
    """Execute a kill, and yield what came of it; nothing if the run had ended before, or the victim did not exist. If
    the run was to end and goes on, because an engine is replaced, its controller is killed then."""
    if not run.await_moment(kill):
        return
    struck, rank = run.strike(kill)
    if not struck:
        return
    if not kill.ends:
        yield run.observe_survival(kill)
    elif kill.victim != "worker":
        yield run.observe_end(kill, rank)
    else:
        yield (ended := run.observe_worker(kill, rank))
        instead = replace(kill, victim="controller")
        if ended.mended and run.running and run.strike(instead)[0]:
            yield run.observe_end(instead, None)


def _judge_flip(result: Result, flip: Flip, ended: Ended, finishes: bool) -> Flip | None:
    """Judge a start after a file was damaged; return the flip if it was killed before it could name the file."""
    dropped = flip.dropped_rows(ended.out + ended.err)
    if dropped is not None:
        result.dropped.setdefault(flip.name, []).extend(dropped)
    elif not finishes:
        return flip
    else:
        result.unnamed_flips.append(f"{flip.name} was damaged, and no resume named it")
    return None


def _resume_changed(result: Result, space: Space, arguments: Sequence[str], reference_s: float) -> None:
    """Resume under another setting, where groups are in progress: it must be refused by key, and change no file."""
    folder = space.seen(space.runs / "run")
    complete = [*complete_checkpoints(folder).values()]
    if not complete or not groups_in_progress(savepoint.read(complete[-1])):
        return
    key, value = CHANGED[(result.chain.index + result.num_changed) % len(CHANGED)]
    before = _modified(folder)
    run = StartedRun(space, [*arguments, f"{key}={value}"], name="run", reference_s=reference_s)
    status = run.wait_for_end()
    result.num_changed += 1
    err = run.describe(NOTHING, status).err
    if status != 1 or not re.search(rf"^error: .*{re.escape(key)}.*cannot resume", err, re.MULTILINE):
        result.not_refused.append(f"{key}={value}: exit status {status}: {err[-400:]}")
    elif before != _modified(folder):
        result.not_refused.append(f"{key}={value}: refused, but files of the run have changed")


def _modified(folder: Path) -> dict[Path, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock.json")
    return {path: path.stat().st_mtime_ns for path in files if not is_temporary(path.name)}


def _collect(result: Result, run: StartedRun) -> None:
    """Fill in what the last start has left."""
    last = run.observe_end(NOTHING, None)
    result.failed = "" if last.status == 0 else f"{last.message}\n{last.err[-4000:]}"
    result.start_s = run.first_step_s or run.start_s
    result.left = last.left
    if result.failed:
        return
    *_, newest = complete_checkpoints(run.folder).values()
    result.left = (*last.left, *left_in(run.folder))
    result.weights = {path.name: sha256(path.read_bytes()).hexdigest() for path in run.folder.glob("hf/*.safetensors")}
    result.remains = Remains.of_state(
        json.loads((newest / "controller.json").read_text()),
        steps=STEPS,
        bound=result.chain.bound,
        metrics=with_dropped(read_rows(run.folder / METRICS), result.dropped.get(METRICS, ()), "step"),
        groups=with_dropped(read_rows(run.folder / GROUPS), result.dropped.get(GROUPS, ()), "group"),
    )


def left_in(folder: Path) -> list[str]:
    """Return the temporary files and unfinished folders in the folder of a run that has gone to its end, without what
    starts before the first checkpoint left, which is kept."""
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    return [str(path) for path in paths if is_temporary(path.name) and not path.parts[0].startswith("start-")]


def is_temporary(name: str) -> bool:
    """Return whether a file or folder of this name is one that is renamed when it is complete. Pure."""
    return name.startswith(".") or name.endswith((".partial", ".old"))


def read_rows(path: Path) -> Sequence[dict[str, Any]]:
    """Return the objects of a JSON-lines file; a missing one has none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
