"""Read a run folder into the data of its report: one JSON object of bounded size, also while it is running."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusion.telemetry.evaluations import RESULT, changes_of
from fusion.telemetry.files import iterate_jsonl, read_jsonl
from fusion.telemetry.folder_lock import is_held
from fusion.telemetry.memory import MemoryLedger, human_bytes
from fusion.telemetry.page.card_time import card_time
from fusion.telemetry.page.cautions import cautions
from fusion.telemetry.page.curves import curves, number, step_seconds
from fusion.telemetry.page.distributions import Distributions
from fusion.telemetry.page.examples import Examples
from fusion.telemetry.page.settings import flatten
from fusion.telemetry.page.typical_step import typical_step
from fusion.telemetry.run_contents import EVALUATION, EVALUATIONS, PROFILES, profiles
from fusion.telemetry.trace import read_timeline

REWARD = "critic/rewards/mean"

MAX_TIMELINE_BYTES = 1 << 28
"""Maximum size of a timeline.json that is read; reading takes about ten times as much memory"""


def read_run(folder: Path | str, outcome: str | None = None) -> dict[str, Any]:
    """Read everything that the report shows of a run. A missing file leaves its part empty.
    ``outcome``: how the run ended, in words; None: found out from the folder.
    Raise ValueError: a file is damaged, other than by an incomplete last line."""
    folder = Path(folder)
    rows, config = read_jsonl(folder / "metrics.jsonl"), read_config(folder / "config.yaml")
    numbers = [{name: number(value) for name, value in row.items()} for row in rows]
    num_steps = max((int(number(row.get("step")) or 0) for row in rows), default=0)
    distributions, examples = Distributions(num_steps), Examples()
    for group in iterate_jsonl(folder / "groups.jsonl"):
        distributions.add(group)
    for sample in iterate_jsonl(folder / "samples.jsonl"):
        examples.add(sample)
    failure = read_failure(folder / "error.json")
    running = outcome is None and is_held(folder)
    ledger = MemoryLedger.merged(MemoryLedger.from_metrics(row) for row in numbers)
    timeline, note = _timeline(folder / "timeline.json", updates=int(_key(config, "algorithm", "minibatches") or 1))
    evaluates = (folder / EVALUATION).exists()
    total = None if evaluates else _key(config, "run", "steps")
    ended = "finished" if evaluates or num_steps == total else "ended early"
    evaluations = read_jsonl(folder / EVALUATIONS, RESULT)
    changes = changes_of(evaluations)
    return {
        "name": folder.resolve().name,
        "running": running,
        "outcome": outcome or ("running" if running else "failed" if failure else ended),
        "steps": num_steps,
        "total_steps": total,
        "wall_s": sum(map(step_seconds, rows)),
        **rewards_of(numbers),
        "curves": curves([*_evaluated_first(evaluations), *rows]),
        **timeline,
        "profiles": [f"{PROFILES}/{name}" for name in profiles(folder)],
        "memory": memory_data(ledger),
        "staleness": distributions.staleness(),
        "max_staleness": _key(config, "stalesync", "max_staleness"),
        "ended": distributions.ended(),
        "lengths": distributions.lengths(),
        "max_length": _key(config, "rollout", "max_response_length"),
        "samples": examples.result(),
        "changes": changes and {"text": changes.describe(), "answers": list(map(asdict, changes.answers))},
        "config": flatten(config),
        "cautions": cautions(rows, distributions.ended(), ledger, failure) + note,
    }


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the config of a run; an empty one without the file. Raise ValueError: it is not a YAML mapping."""
    import yaml

    if not path.exists():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a mapping of config groups")
    return config


def read_failure(path: Path) -> str | None:
    """Return the error of `error.json` with its rank and stage in one line; None: the run has not failed."""
    try:
        failure = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        failure = None
    if not isinstance(failure, dict):
        return f"{path.name} cannot be read"
    rank = "controller" if failure.get("rank") is None else f"rank {failure['rank']}"
    message = str(failure.get("message")).splitlines()
    return f"{rank}, stage {failure.get('stage')}, step {failure.get('step')}: {''.join(message[:1])} (run.log)"


def rewards_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `reward_start` and `reward_end`, means of `reward_window` steps each; nothing without rewards."""
    rewards = [row[REWARD] for row in rows if row.get(REWARD) is not None]
    if not rewards:
        return {}
    window = max(1, min(5, len(rewards) // 10))
    start, end = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    return {"reward_start": start, "reward_end": end, "reward_window": window}


def _evaluated_first(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of step 0 with the rewards of the evaluation before the first step, named as in `metrics.jsonl`; []
    without one."""
    row: dict[str, Any] = {
        f"val-core/{result['file']}/{name}": estimate["value"]
        for result in results
        for name, estimate in result["estimates"].items()
        if result["step"] == 0 and name.startswith("reward/") and name.endswith(f"@{result['samples']}")
    }
    return [{"step": 0} | row] if row else []


def memory_data(ledger: MemoryLedger) -> dict[str, Any] | None:
    """Return bytes by phase and owner, the peaks, and the capacity of a card; None if nothing was recorded."""
    if not ledger.phases:
        return None
    by_owner = {phase: [ledger.by_owner[phase].get(owner, 0) for owner in ledger.owners] for phase in ledger.phases}
    return {
        "phases": ledger.phases,
        "owners": ledger.owners,
        "by_owner": by_owner,
        "peak": ledger.peak,
        "capacity": ledger.capacity,
    }


def _timeline(path: Path, updates: int) -> tuple[dict[str, Any], list[str]]:
    """Return the cards' time and a typical step, and a caution if they are left out. ``updates``: in a step."""
    left_out = {"cards": None, "typical": None}
    if not path.exists():
        return left_out, []
    if (size := path.stat().st_size) > MAX_TIMELINE_BYTES:
        limit = human_bytes(MAX_TIMELINE_BYTES)
        return left_out, [f"timeline.json has {human_bytes(size)}: the cards' time is left out above {limit}"]
    try:
        spans = read_timeline(path)
        return {"cards": card_time(spans), "typical": typical_step(spans, updates)}, []
    except ValueError as error:
        return left_out, [f"the cards' time is left out: {error}"]


def _key(config: Mapping[str, Any], group: str, name: str) -> Any:
    values = config.get(group)
    return number(values.get(name)) if isinstance(values, Mapping) else None
