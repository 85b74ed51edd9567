"""Runs as a user starts them, for the tests of this folder."""

import json
import time
from pathlib import Path

from safetensors.torch import load_file

from tests import machine
from tests.warm import descendants, kill, launcher  # noqa: F401

SMALL = [
    "device=emulated",
    "data=addition",
    "data.max_prompt_length=8",
    "data.prompts_per_step=8",
    "rollout.max_response_length=5",
    "algorithm.group_size=4",
    "run.eval_prompts=4",
]
FOUR = ["cluster=four", "parallel=tp2ep2_ep4"]

JUDGE = """
import time, zlib

def score(prompt, response, answer, **fields):
    luck = zlib.crc32((prompt + response).encode()) % 9
    if luck == 0:
        raise RuntimeError("no such judge")
    if luck == 1:
        time.sleep(60)
    return "good" if luck == 2 else float(response == answer)
"""


def command_of(base, folder, *overrides):
    return ["scripts/train.py", f"model.path={base}", f"run.dir={folder}", *SMALL, *overrides]


def train(base, folder, *overrides, timeout_s=180):
    """A run from its start to its end, on the Ray of other runs that went before it."""
    return launcher().session().run(command_of(base, folder, *overrides), timeout_s)


def begin(base, folder, *overrides):
    """A run that may be signalled and killed."""
    return launcher().start(command_of(base, folder, *overrides))


def rows_of(run):
    """Of metrics.jsonl, without the line that a run still writes."""
    whole, _, _ = (run / "metrics.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def weights_of(folder):
    """Of a Hugging Face folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def wait_until(run, seconds, reached):
    """What ``reached`` returns once it is true."""

    def asked():
        found = reached()
        assert found or run.poll() is None, run.communicate()
        return found

    return machine.wait_for(asked, seconds, every_s=0.1)


def alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids, within_s=10):
    deadline = machine.Deadline(within_s)
    while (left := [pid for pid in pids if alive(pid)]) and not deadline.expired():
        time.sleep(0.1)
    assert not left, f"these processes of ours have not ended in {deadline}"
