"""A run as `scripts/train.py` starts it, which stands still at a boundary of a turn or an update, for whoever kills it.

    python tests/stalesync/stopped_run.py BOUNDARY MARK overrides …

It stops when the boundary is reached for the third time, that of an update for the first time, in a start that goes on
from a checkpoint or has written one, and creates the file MARK.
"""

import sys
import time
from importlib import import_module
from pathlib import Path

BOUNDARIES = {
    "ended": ("stalesync.loop.conversing:Conversing", "_read_turns", "before"),
    "asked": ("stalesync.prompts.environments:Environments", "step", "after"),
    "answered": ("stalesync.prompts.environments:Environments", "observe", "after"),
    "appended": ("stalesync.policy.admission:Admission", "observe_returned", "before"),
    "completed": ("stalesync.loop.conversing:Conversing", "_complete", "after"),
}
"""The turn's row is in the queue; its environment is asked; has answered; the observation is in the row, and the
request is still away; the finished sample is in the queue, and nobody was told: a method, and where beside it"""
BRANCHES = {
    "rewritten": ("stalesync.policy.admission:Admission", "observe_branched", "before"),
    "branched": ("stalesync.policy.admission:Admission", "observe_branched", "after"),
}
"""Of a branch: the request is still away; waits behind another prompt, and its row is not completed"""

TRAINING = {
    "training": ("stalesync.loop.update:Updater", "begin", "after"),
    "trained": ("stalesync.loop.update:Updater", "finish", "after"),
}
"""Of an update: its samples are claimed, and cards train; the optimizer has stepped, and nothing is saved"""


def stop_at(boundary, mark):
    """Stand still there."""
    from stalesync.loop.checkpoints import Saver

    path, name, side = (BOUNDARIES | BRANCHES | TRAINING)[boundary]
    module, _, owner_name = path.partition(":")
    owner = getattr(import_module(module), owner_name)
    method, begin, state = getattr(owner, name), Saver.begin, {"saved": "run.resume=true" in sys.argv, "count": 0}

    def begin_and_note(self, write, **options):
        def noted():
            write()
            state["saved"] = True

        begin(self, noted, **options)

    def stopping(self, *args, **options):
        counts = bool(self._to_complete if name == "_complete" else args[0])
        if side == "before":
            stand(counts)
        result = method(self, *args, **options)
        if side == "after":
            stand(counts)
        return result

    def stand(counts):
        state["count"] += bool(state["saved"] and counts)
        if state["count"] == (1 if boundary in TRAINING else 3):
            mark.touch()
            time.sleep(600)

    setattr(owner, name, stopping)
    Saver.begin = begin_and_note


if __name__ == "__main__":
    sys.path.insert(0, "scripts")
    import train

    boundary, mark = sys.argv.pop(1), Path(sys.argv.pop(1))
    stop_at(boundary, mark)
    train.main()
