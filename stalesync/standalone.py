"""Evaluate a checkpoint or a model folder alone (`scripts/evaluate.py`): the evaluation before the first step of a run
that has no step."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from fusion.npu.config import OPERATORS
from stalesync.job.config import Config
from stalesync.job.overrides import accepted, composed, load, quoted

OWN: tuple[str, ...] = ("run.resume", "run.steps", "eval.best", "eval.every", "model.path")
"""Keys that have no meaning here, or that the source decides"""


@dataclass(frozen=True)
class EvaluationArguments:
    """What is evaluated, and how. ``json``: where the results are written besides the evaluation's folder; `-`: they
    are printed to the standard output, and all else to the standard error."""

    source: Path
    config: Config
    json: str | None = None

    @property
    def is_model(self) -> bool:
        """Whether the source is a model; else a checkpoint is exported first."""
        return (self.source / "config.json").is_file()


def parse_arguments(arguments: Sequence[str], conf: Path) -> EvaluationArguments:
    """Parse the command line; ``conf``: folder of the config groups. Raise ValueError for an argument that is not
    accepted, or a source that is neither a run, a checkpoint nor a model."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--json")
    try:
        options, words = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        raise ValueError("--json: expected a path") from None
    if options.json not in (None, "-") and (not (path := Path(options.json)).parent.is_dir() or path.is_dir()):
        raise ValueError(f"--json {options.json}: expected a file in a folder that exists")
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ValueError("expected the folder of a run, a checkpoint or a model")
    source, overrides = Path(words[0]), accepted(words[1:], conf)
    stated, own = {word.partition("=")[0].lstrip("+") for word in overrides}, OWN
    if (source / "config.json").is_file():
        config = composed(conf, ["run.eval_prompts=0", f"model.path={quoted(str(source))}", *overrides])
    else:
        config = composed(conf, overrides, saved=load(_config_of(source)))
        if "device.operators" not in stated and config.device.kind not in OPERATORS[config.device.operators]:
            config.device.operators = "auto"  # other cards may evaluate than those of the run
        if config.training.lora.rank:
            own += ("model.adapter",)
    if unused := [key for key in own if key in stated]:
        raise ValueError(f"{unused[0]}: an evaluation alone takes no such setting; leave it out")
    config.run.resume, config.eval.best = "false", None
    if "run.name" not in stated:
        config.run.name = f"evaluate-{_name_of(source)}"
    if not (config.eval.files or config.run.eval_prompts):
        raise ValueError("eval.files=[]: expected files, or run.eval_prompts above 0")
    if not (config.data.source or config.run.eval_prompts):  # nothing is trained: no other rows are read
        config.data = config.eval.specs()[0].data(config.data)
    return EvaluationArguments(source, config, options.json)


def evaluate(arguments: EvaluationArguments, usage: str) -> None:
    """Run the evaluation, write its results, and report where. End the process if it fails, with ``usage`` if the
    config is wrong."""
    from stalesync.command_line import fail, refuse, run_job

    config, checkpoint = arguments.config, None
    shown = redirect_stdout(sys.stderr) if arguments.json == "-" else nullcontext()
    with tempfile.TemporaryDirectory(prefix="evaluate-") as folder, shown:
        if not arguments.is_model:
            from stalesync.job import savepoint
            from stalesync.job.conversion import checkpoint_in, convert

            exported = Path(folder) / "model"
            if config.training.lora.rank:
                config.model.adapter = str(exported)
            else:
                config.model.path = str(exported)
            try:
                checkpoint = checkpoint_in(arguments.source)
                convert(checkpoint, exported)
            except (ValueError, OSError) as error:
                fail(f"error: {error}", error)
        try:
            config.validate(trains=False)
        except ValueError as error:
            refuse(usage, error)
        step = None if checkpoint is None else savepoint.read(checkpoint)["step"]
        of = "" if step is None else f"step {step} of "
        run = run_job(config, evaluates=f"{of}{arguments.source}", step=step or 0)
    _write(arguments, checkpoint, step, run)


def _write(arguments: EvaluationArguments, checkpoint: Path | None, step: int | None, run: Path) -> None:
    from fusion.telemetry.files import read_jsonl, write_atomic
    from fusion.telemetry.run_contents import EVALUATION, EVALUATIONS

    results = [{key: value for key, value in row.items() if key != "step"} for row in read_jsonl(run / EVALUATIONS)]
    model = {
        "model": str(arguments.source),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "step": step,
    }
    text = json.dumps(model | {"results": results}, indent=2, ensure_ascii=False) + "\n"
    write_atomic(run / EVALUATION, text)
    if arguments.json == "-":
        print(text, end="")
        return
    path = Path(arguments.json or run / EVALUATION)
    write_atomic(path, text)
    print(f"results: {path}", file=sys.stderr)


def _config_of(source: Path) -> Path:
    """Return the saved config of a run, or of the run of a checkpoint."""
    for folder in (source, *source.resolve().parents[1:2]):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise ValueError(f"{source}: expected the folder of a run (with config.yaml), a checkpoint of it, or a model")


def _name_of(source: Path) -> str:
    path = source.resolve()
    return f"{path.parents[1].name}-{path.name}" if path.parent.name == "checkpoints" else path.name
