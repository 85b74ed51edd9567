"""Export a kept checkpoint of a run to a Hugging Face folder (`scripts/convert.py`)."""

from pathlib import Path

from fusion.model.tokenizer_files import has_tokenizer
from fusion.telemetry.manifest import find_damage
from fusion.telemetry.run_contents import complete_checkpoints
from stalesync.job import savepoint


def convert(source: Path, out: Path, tokenizer: Path | None = None, merge: bool = False) -> str:
    """Write the weights of a checkpoint to ``out``; return a line that says what was written. ``source``: the folder of
    a run, whose newest checkpoint is taken, or of a checkpoint; ``tokenizer``: the folder whose tokenizer files are
    copied. None: the run's own export, or its `model.path`; ``merge``: write the whole model of a run that trained
    adapters, whose base is its `model.path`. Raise ValueError if ``source`` holds no complete checkpoint, a file of it
    (named) is damaged, ``tokenizer`` holds none, or ``out`` is not empty."""
    checkpoint = checkpoint_in(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists: expected a new or an empty folder")
    if tokenizer and not has_tokenizer(tokenizer):
        raise ValueError(f"--tokenizer {tokenizer}: expected a folder with a tokenizer")
    if damage := find_damage(checkpoint):
        raise ValueError(f"{checkpoint} is damaged: {damage}")
    tokenizer = tokenizer or _tokenizer_of(checkpoint)
    from fusion.training.checkpoint import adapters_in, read_trainer
    from fusion.training.export import export_checkpoint

    base = _base_of(checkpoint)
    export_checkpoint(checkpoint / savepoint.TRAINER, out, tokenizer, base=base, merge=merge)
    step = savepoint.read(checkpoint)["step"]
    if adapters_in(read_trainer(checkpoint / savepoint.TRAINER)) and not merge:
        return f"{out}: the adapters after step {step} ({checkpoint}) of {base}, as peft stores them"
    return f"{out}: the model after step {step} ({checkpoint}), with " + (
        f"the tokenizer of {tokenizer}" if tokenizer else "no tokenizer: none was found; name its folder by --tokenizer"
    )


def checkpoint_in(source: Path) -> Path:
    """Return a checkpoint's folder itself, or the newest of a run; raise ValueError if none is complete."""
    if (source / savepoint.MARK).is_file() and (source / savepoint.NAME).is_file():
        return source
    complete = [*complete_checkpoints(source).values()]
    if complete:
        return complete[-1]
    if (source / savepoint.NAME).is_file() or (source / "checkpoints").is_dir():
        raise ValueError(f"{source}: no checkpoint in it is complete, or an earlier version wrote it")
    raise ValueError(f"{source}: expected the folder of a run, or a checkpoint (runs/NAME/checkpoints/step-N)")


def _tokenizer_of(checkpoint: Path) -> Path | None:
    """Return the first folder with a tokenizer: the run's export, then the model that the run began with."""
    run = checkpoint.resolve().parents[1]
    candidates = [run / "hf", *filter(None, [_base_of(checkpoint)])]
    return next((folder for folder in candidates if has_tokenizer(folder)), None)


def _base_of(checkpoint: Path) -> Path | None:
    """Return the folder of the model that the checkpoint's run began with."""
    path = checkpoint.resolve().parents[1] / "config.yaml"
    if not path.is_file():
        return None
    import yaml

    return Path(yaml.safe_load(path.read_text())["model"]["path"])
