"""A run as `scripts/train.py` starts it, whose controller records its decisions.

    python tests/stalesync/simulator/recorded_run.py DECISIONS.jsonl overrides …

A line for each decision: `admit` with the groups and the lengths of their
prompts, `dispatch` with requests by engine, `train` with the groups that are trained or accumulated, oldest first.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def recording(path):
    """Records the decisions of runs inside the block; the process may do other runs after it."""
    from stalesync.loop.controller import Controller
    from stalesync.loop.groups import Groups
    from stalesync.policy.commands import Accumulate, Dispatch, Train

    execute, admit = Controller.execute, Groups.admit

    def write(**line):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def recorded_execute(self, command, *args, **options):
        if isinstance(command, Dispatch):
            by_engine = command.requests_by_engine
            write(kind="dispatch", requests={str(n): list(requests.ids) for n, requests in by_engine.items()})
        if isinstance(command, Accumulate | Train):
            write(kind="train", groups=list(command.groups))
        return execute(self, command, *args, **options)

    def recorded_admit(self, prompts):
        prompts = list(prompts)
        write(kind="admit", groups=[one.id for one in prompts], prompt_tokens=[len(one.ids) for one in prompts])
        return admit(self, prompts)

    Controller.execute, Groups.admit = recorded_execute, recorded_admit
    try:
        yield
    finally:
        Controller.execute, Groups.admit = execute, admit


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[3]
    sys.path[:0] = [str(root), str(root / "scripts")]
    import train

    with recording(sys.argv.pop(1)):
        train.main()
