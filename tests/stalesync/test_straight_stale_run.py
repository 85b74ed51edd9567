"""A run that is ahead of its training, and trains its steps in parts and minibatches, trains what a plain loop does."""

import json
from math import ceil

import pytest
import torch

from stalesync.job.overrides import load
from tests.stalesync import straight_line
from tests.stalesync.recorded_run import COLUMNS
from tests.stalesync.runs import command_of, rows_of
from tests.training.sequences import sequences_of
from tests.warm import launcher

STEPS, MINIBATCHES = 8, 2
OPTIONS = f"""cluster.npus=2 parallel=single stalesync.max_staleness=1 run.steps={STEPS} run.eval_prompts=0
algorithm.minibatches={MINIBATCHES} training.lr=1e-3""".split()
LONG = "rollout.max_response_length=800 rollout.sampling.forced_median=100".split()
"""Generation takes longer than training"""
TAIL = """rollout.engine.max_seqs=32 rollout.max_response_length=1000 rollout.sampling.forced_median=30
rollout.sampling.forced_spread=[0.1,0.1,0.02]""".split()
"""A few responses take many times as long as a switch to training: cards are lent meanwhile"""


@pytest.mark.extended
@pytest.mark.parametrize(("deployment", "lengths"), [("separate", LONG), ("hybrid", TAIL)], ids=["separate", "hybrid"])
def test_a_stale_run_is_the_straight_line_through_the_samples_that_it_trains(base, luck, tmp_path, deployment, lengths):
    """To the bit, with gradients of parts added as they came; that they are those of the whole batch is tested with
    the trainer."""
    options = [*OPTIONS, *lengths, luck, f"fusion={deployment}"]
    (_, *overrides), folder = command_of(base, tmp_path, *options), tmp_path / "parts"
    folder.mkdir()
    done = launcher().session().run(["tests/stalesync/recorded_run.py", str(folder), *overrides], 180)
    assert done.returncode == 0, done.stdout + done.stderr
    run, num_files = tmp_path / "run", len([*folder.iterdir()])
    rows, parts = rows_of(run), [torch.load(folder / f"{number + 1}.pt") for number in range(num_files)]
    num_parts = [int(row["training/parts_total"]) for row in rows]
    assert sum(num_parts) == len(parts) and max(num_parts) > 1, "parts are accumulated in the tail of generation"
    assert sum(row["staleness/lag_1_count"] for row in rows) > 0
    assert sum(row["staleness/mixed_versions_count"] for row in rows) > 0, "weights arrive while samples are generated"
    found = [_flat(part["weights"]) for part in parts if part["update"]]
    line = straight_line.train(load(run / "config.yaml"), _steps(run, parts))
    for step, (weights, expected) in enumerate(zip(found, map(_flat, line), strict=True)):
        assert torch.equal(weights, expected), f"step {step + 1} of {num_parts} parts"


def _flat(weights):
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def _steps(run, parts):
    """The minibatches of each step, each in its parts. They are runs of as many groups, in order of the parts, the
    oldest of a part first."""
    part_of = {_group(id): number for number, part in enumerate(parts) for ids in part["ids"] for id in ids}
    columns = {name: {id: one for part in parts for id, one in part["columns"][name].items()} for name in COLUMNS}
    rows = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: (part_of[row["group"]], -row["lag"], row["group"]))
    rest = iter(parts)
    for step in range(1, STEPS + 1):
        of_step = list(_up_to(lambda part: part["update"], rest))
        assert all(len(part["ids"]) == 1 for part in of_step[:-1]), "what is accumulated is of one minibatch"
        minibatches = [
            [*(part["ids"][0] for part in of_step[:-1]), of_step[-1]["ids"][0]],
            *([ids] for ids in of_step[-1]["ids"][1:]),
        ]
        groups = [row["group"] for row in rows if row["step"] == step]
        size = ceil(len(groups) / MINIBATCHES)
        expected = [{*groups[start : start + size]} for start in range(0, len(groups), size)]
        assert [{_group(id) for ids in parts for id in ids} for parts in minibatches] == expected
        yield [[_sequences(sorted(ids), columns) for ids in parts if ids] for parts in minibatches]


def _group(id):
    return id.split("/")[0]


def _up_to(ends, items):
    """The next of ``items``, up to the first that ``ends``."""
    for item in items:
        yield item
        if ends(item):
            return


def _sequences(ids, columns):
    of = {name: [values[id] for id in ids] for name, values in columns.items()}
    advantages = torch.cat(of.pop("advantage"))
    return sequences_of(of.pop("prompt"), of.pop("response"), advantages=advantages, **of)
