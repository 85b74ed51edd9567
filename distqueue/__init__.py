"""DistQueue: samples between the stages of RL training: packed, versioned, leased, durable against process crashes.

            put(batch, groups, versions)             get(task, columns, count) ──► leased PackedBatch ──► ack(task, ids)
                     │    │ payload                        ▲ │ ids and places
    ┌────────────────▼────┼────────────────────────────────┼─▼─────────────────────────────┐
    │ core/      decides: │                                │       one actor (actor.py)    │ ◄ client.py: DistQueue
    │   samples/    SampleTable: columns held, versions, leases, groups, endings           │   local.py: LocalQueue,
    │   segments.py    which segment lies in which file of which shard                     │     the same in one process
    │   journal.py     every change on disk before it is acknowledged                      │   stream.py: a data loader
    └─────────────────────┼────────────────────────────────┼───────────────────────────────┘   inspection.py: the state
                          ▼                                │ payload                             as text
      payload/    one shard per node (fleet.py): segments in shared memory, mapped by the processes of that node, and
                  copied from there into a reader's memory, each byte once

    interface.py, request.py   SampleQueue: the methods of both queues; GetRequest: the arguments of every `get`
    packed.py, column.py       PackedBatch of Columns: one buffer and one offsets table each, samples are views
    layout.py                  what the actor and the shards, which do not load torch, know of a column: its layout
    grants.py                  the files that a client was granted for its next puts
    actor_calls.py             calls of actors, repeated while one is restarting
    hierarchy/                 one read for the ranks that need the same samples, then a broadcast among them
    messages.py                metadata as bare bytes: no pickle, no padding
    checkpoint.py              the queue as of one instant, in a folder from which another queue resumes

The life of a sample: its first put creates its row; further puts add columns as stages finish; each task gets it once
all requested columns exist, oldest first; an expired lease hands it out again; an acknowledged sample never is; it is
freed once every task has acknowledged it ("done"), or by `drop` ("dropped:<reason>").

Public interface, for use without the rest of this project (docs/distqueue.md): everything this package exports, and
`distqueue.hierarchy.GroupReader`. That includes what this project's own runs do not use: `stream` and `QueueDataset`.

Put samples, then columns of them, and get what is complete:

>>> import torch
>>> from distqueue import LocalQueue, PackedBatch, stream
>>> queue = LocalQueue(["reward", "train"])  # DistQueue.create(...) across processes, after ray.init()
>>> ids, tokens = ["a", "b", "c", "d"], [torch.arange(n) for n in (3, 5, 2, 4)]
>>> queue.put(PackedBatch.from_samples(ids, {"tokens": tokens}), groups=["g", "g", "h", "h"], versions=[6, 7, 7, 7])
()
>>> batch = queue.get("reward", ["tokens"], count=4)  # waits; batch["tokens"][i] is a view
>>> queue.put(PackedBatch.from_samples(batch.ids, {"reward": torch.tensor([0.0, 1.0, 1.0, 0.0])}))
()
>>> queue.ack("reward", batch.ids)

Take what is ready instead of waiting:

>>> batch = queue.get("train", ["tokens"], count=64, partial=True)
>>> queue.give_back("train", batch.ids)

Iterate, acknowledging each batch when the next is requested, until the queue is sealed and drained:

>>> queue.seal()
>>> [batch.ids for batch in stream(queue, "train", ["tokens", "reward"], count=2)]
[('a', 'b'), ('c', 'd')]
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
