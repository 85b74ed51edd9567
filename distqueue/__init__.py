"""DistQueue: samples between the stages of RL training, packed, versioned and handed out once.

            put(batch, groups, versions)             get(task, columns, count) ──► leased PackedBatch ──► ack(task, ids)
                        │                                          ▲
   ┌────────────────────▼──────────────────────────────────────────┴─────────────────┐
   │ queue.py    LocalQueue: lock, waiting without polling                           │   client.py: DistQueue, the
   │    table.py    SampleTable: rows, columns held, groups, leases, endings (pure)  │ ◄ same face across processes,
   │    storage.py  PayloadStore: segments, gathered once per get                    │   in one async Ray actor;
   └─────────────────────────────────────────────────────────────────────────────────┘   wire.py: header + bare buffers
     hierarchy.py    read_once: one request for a group of ranks that need the same, then a broadcast among them
     packed.py, column.py    PackedBatch of Columns: one buffer and one offsets table each, samples are views

The life of a sample: a first put creates its row; further puts add columns as stages finish; each task gets it when the
columns it asks for are all there, oldest first; a lease that runs out hands it out again; an acknowledged one never is;
it is freed when every task has acknowledged it ("done"), or by `drop` ("dropped:<reason>").

    queue = DistQueue.create(["reward", "train"], group_size=8)
    queue.put(PackedBatch.from_samples(ids, {"tokens": [ids_L, ...]}), groups=group_ids, versions=[7] * len(ids))
    batch = queue.get("reward", ["tokens"], count=64)            # waits; batch["tokens"][i] is a view
    queue.put(PackedBatch.from_samples(batch.ids, {"reward": reward_B}))
    queue.ack("reward", batch.ids)
    batch = queue.get("train", ["tokens", "reward"], count=512, whole_groups=True)
"""

from distqueue.client import DistQueue
from distqueue.column import Column
from distqueue.packed import PackedBatch
from distqueue.queue import LocalQueue, QueueClosed

__all__ = ["Column", "DistQueue", "LocalQueue", "PackedBatch", "QueueClosed"]
