"""Train a small base model to start from.

    python scripts/make_base.py addition runs/base/addition [--seed 0] [--target 0.2]
    python scripts/make_base.py addition runs/base/pangu-tiny --shape recipes/shapes/tiny/pangu.yaml

Tasks: addition (one-digit sums, takes seconds), worked_arithmetic (long answers with every step, takes a few minutes),
counting (ends too early, takes seconds), calculator (calls of a tool, for small sums only, takes minutes), guess
(guesses at random, takes half a minute).
The model is a small Qwen3-MoE, or what the `config` of a --shape file describes, in the fields of a `config.json`.
The folder becomes a Hugging Face checkpoint; if it already contains one, the script does nothing.
"""

import argparse
from pathlib import Path
from typing import Any

from fusion.resources import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("task", choices=["addition", "worked_arithmetic", "counting", "calculator", "guess"])
    parser.add_argument("folder", type=Path, help="folder for the Hugging Face checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights and the prompts")
    parser.add_argument("--target", type=float, help="accuracy at which the warm-up stops (default: the task's own)")
    parser.add_argument("--shape", type=Path, help="YAML file whose config describes the architecture")
    parser.add_argument("--device", default="emulated", choices=("auto", "npu", "cuda", "emulated"))
    options = parser.parse_args()
    if options.target is not None and not 0 <= options.target <= 1:
        parser.error(f"--target {options.target}: expected a share from 0 to 1")
    if (options.folder / "config.json").is_file():
        print(f"base model: {options.folder} exists already")
        return
    shape = None if options.shape is None else _read_shape(options.shape, parser)

    from fusion.npu import open_device
    from stalesync.job.base_model import make_base_model

    changes = {} if options.target is None else {"target": options.target}
    try:
        device = open_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        accuracy = make_base_model(options.task, options.folder, device, seed=options.seed, shape=shape, **changes)
    except ValueError as error:
        parser.error(f"--shape {options.shape}: {error}" if options.shape else str(error))
    except RuntimeError as error:  # the accuracy was not reached
        parser.exit(1, f"error: {error}\n")
    print(f"base model: {options.folder}, accuracy {accuracy:.0%}")


def _read_shape(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    import yaml

    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"--shape {path}: {error}")
    if not isinstance(read, dict) or not isinstance(read.get("config"), dict):
        parser.error(f"--shape {path}: expected a YAML file with a table `config`")
    return read["config"]


if __name__ == "__main__":
    main()
