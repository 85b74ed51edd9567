"""Makes a small base model to train: python scripts/make_base.py addition runs/base/addition [--seed 0] [--target 0.2]

Tasks: addition (one-digit sums, seconds), worked_arithmetic (long answers with their working, a few minutes). The
folder is a Hugging Face checkpoint; where it already holds one, nothing is done.
"""

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["addition", "worked_arithmetic"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, help="accuracy at which the warm-up stops (default: the task's own)")
    parser.add_argument("--device", default="emulated", help="auto, npu, cuda or emulated")
    given = parser.parse_args()
    if (given.folder / "config.json").is_file():
        print(f"base model: {given.folder} is there already")
        return

    from fusion.npu import open_device
    from stalesync.base_model import make_base_model

    changes = {} if given.target is None else {"target": given.target}
    accuracy = make_base_model(given.task, given.folder, open_device(given.device), given.seed, **changes)
    print(f"base model: {given.folder}, right {accuracy:.0%} of the time")


if __name__ == "__main__":
    main()
