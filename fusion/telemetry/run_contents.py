"""Find what lies in the folder of a run, also of one that is running or was killed.

runs/<name>/config.yaml       the resolved configuration
            metrics.jsonl     one JSON object per step
            tensorboard/      the same figures as TensorBoard events; wandb/, mlflow.db, … of other loggers
            loggers.json      the id of the run in all loggers (`loggers/`)
            samples.jsonl     a few samples of every step: step, prompt, response, reward
            groups.jsonl      every group that has ended: step, group, ended (trained, failed:…, filtered:…), and of
                              trained ones lag, prompt_tokens, response_tokens (sampled) and, of conversations,
                              observation_tokens
            control.jsonl     changes to generation during the run, and requests that were refused
            evaluations.jsonl every evaluation: step, file, and estimates with their intervals
            evaluation.json   the results of an evaluation alone, once it has ended
            best.json         the best checkpoint: metric, value, step, checkpoint; only with `eval.best`
            timeline.json     spans of every card; open it in https://ui.perfetto.dev
            profile/          step-<n>-card-<rank>.json: profiler traces of the steps in `run.profile_steps`
            checkpoints/      step-<n>: from which a run resumes
            hf/               the model as a Hugging Face folder
            logs/             what every process logged; run.log, error.json: why the run failed
            report.html       all of it as one page, written when the run ends (`page/`)
            start-<n>/        what starts left that had no checkpoint (`run.resume=auto`), or failed before a step
            lock.json         locked while the run has the folder; names its process
"""

import re
from pathlib import Path
from shlex import quote

from fusion.telemetry.manifest import NAME as CHECKPOINT_MARK

METRICS, SAMPLES, GROUPS, EVALUATIONS = "metrics.jsonl", "samples.jsonl", "groups.jsonl", "evaluations.jsonl"
BEST, EVALUATION = "best.json", "evaluation.json"
LOGS = (METRICS, SAMPLES, GROUPS, EVALUATIONS, "control.jsonl")
"""Logs of which a checkpoint seals the rows"""
PROFILES = "profile"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder by its name; None if it is no checkpoint of the run, such as a copy
    (`step-4-good`) that a user keeps beside them."""
    match = re.fullmatch(r"step-(0|[1-9][0-9]*)", name, re.ASCII)
    return int(match[1]) if match else None


def complete_checkpoints(path: Path) -> dict[int, Path]:
    """Map the steps of a run's complete checkpoints to their folders, in ascending order."""
    return _checkpoints(path, marked=True)


def unmarked_checkpoints(path: Path) -> dict[int, Path]:
    """Map the steps of a run's checkpoints that are not marked as complete to their folders, in ascending order."""
    return _checkpoints(path, marked=False)


def _checkpoints(path: Path, *, marked: bool) -> dict[int, Path]:
    by_step = {step_of(folder.name): folder for folder in path.glob("checkpoints/step-*")}
    return {
        step: by_step[step]
        for step in sorted(step for step in by_step if step is not None)
        if (by_step[step] / CHECKPOINT_MARK).exists() == marked
    }


def describe(path: Path | str) -> list[str]:
    """Describe a run folder: its path, then a line for each existing file or folder. Incomplete checkpoints are not
    counted."""
    path = Path(path)
    checkpoints = [folder.name for folder in complete_checkpoints(path).values()]
    metrics, traces = path / METRICS, profiles(path)
    steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    contents = {
        "run.log": "why the run failed, with the log of every rank; error.json",
        "report.html": "curves, cards, memory and samples; open it in a browser",
        "config.yaml": "the resolved configuration",
        METRICS: f"{steps} steps, one JSON object each",
        "tensorboard/": f"tensorboard --logdir {quote(str(path / 'tensorboard'))}",
        SAMPLES: "samples of every step with their rewards",
        GROUPS: "how every group of samples has ended",
        EVALUATIONS: "every evaluation by file, with confidence intervals",
        BEST: "which checkpoint is the best",
        "control.jsonl": "changes to generation during the run",
        "timeline.json": "what every card did; open it in https://ui.perfetto.dev",
        "profile/": f"{len(traces)} profiler traces: {', '.join(traces[:4])}{' …' * (len(traces) > 4)}",
        "checkpoints/": f"{len(checkpoints)} kept: {', '.join(checkpoints[-3:])}",
        "hf/": "the trained model as a Hugging Face folder, with its tokenizer",
    }
    has_contents = {
        METRICS: steps > 0,
        "tensorboard/": any(path.glob("tensorboard/*")),
        "profile/": bool(traces),
        "checkpoints/": bool(checkpoints),
        "hf/": (path / "hf" / "config.json").exists(),
    }
    shown = [name for name in contents if has_contents.get(name, (path / name).exists())]
    return [f"{path}/", *(f"  {name:<17} {contents[name]}" for name in shown)]


def profiles(path: Path) -> list[str]:
    """Return the names of a run's profiler traces, by step and card. One that is incomplete is left out."""

    def numbers(name: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", name)]

    return sorted((trace.name for trace in (path / PROFILES).glob("step-*-card-*")), key=numbers)
