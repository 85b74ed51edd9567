"""A group of ranks reads once and gets the same."""

import torch

from distqueue import LocalQueue, PackedBatch
from distqueue.hierarchy import read_once
from tests.helpers import run_ranks


class CountingQueue:
    """A real queue whose reads are counted."""

    def __init__(self):
        self.reads = 0
        self.queue = LocalQueue(["train"])
        self.queue.put(
            PackedBatch.from_samples(
                ["a", "b"],
                {
                    "tokens": [torch.arange(3), torch.arange(0)],
                    "logprobs": [torch.ones(3, dtype=torch.bfloat16), torch.ones(0, dtype=torch.bfloat16)],
                    "answer": ["7", "8"],
                    "reward": torch.tensor([1.0, 0.0]),
                },
            )
        )

    def read(self, ids, columns):
        self.reads += 1
        return self.queue.read(ids, columns)


def _read(rank, device):
    import torch.distributed as dist

    queue = CountingQueue()
    group = dist.new_group([0, 1])
    batch = read_once(queue, ["b", "a"], ["tokens", "logprobs", "reward"], group)
    try:
        read_once(queue, ["a"], ["missing"], group)
        refused = ""
    except ValueError as error:
        refused = str(error)
    tokens = [batch["tokens"][i].tolist() for i in range(2)]
    return queue.reads, batch.ids, tokens, batch["logprobs"][1].dtype, batch["reward"].buffer.tolist(), refused


def test_the_leader_reads_and_everyone_gets_it():
    first, second = run_ranks(_read, 2)
    assert (first[0], second[0]) == (2, 0), "only the leader asks the queue"
    assert first[1:] == second[1:]
    assert first[1] == ("b", "a") and first[2] == [[], [0, 1, 2]] and first[4] == [0.0, 1.0]
    assert first[3] is torch.bfloat16 and "missing" in first[5] and "'a'" in first[5]
