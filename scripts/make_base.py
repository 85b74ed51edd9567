"""Trains a small base model to start from.

    python scripts/make_base.py addition runs/base/addition [--seed 0] [--target 0.2]

Tasks: addition (one-digit sums, seconds), worked_arithmetic (long answers with their working, a few minutes). The
folder is a Hugging Face checkpoint; if it already holds one, the script does nothing.
"""

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["addition", "worked_arithmetic"])
    parser.add_argument("folder", type=Path, help="folder for the Hugging Face checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights and the prompts")
    parser.add_argument("--target", type=float, help="accuracy at which the warm-up stops (default: the task's own)")
    parser.add_argument("--device", default="emulated", help="auto, npu, cuda or emulated")
    given = parser.parse_args()
    if (given.folder / "config.json").is_file():
        print(f"base model: {given.folder} exists already")
        return

    from fusion.npu import open_device
    from stalesync.base_model import make_base_model

    changes = {} if given.target is None else {"target": given.target}
    accuracy = make_base_model(given.task, given.folder, open_device(given.device), given.seed, **changes)
    print(f"base model: {given.folder}, accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main()
