"""DistQueue: samples between the stages of RL training, packed, versioned, leased, and lost by nobody's death.

            put(batch, groups, versions)             get(task, columns, count) ──► leased PackedBatch ──► ack(task, ids)
                     │    │ payload                        ▲ │ who, and where
    ┌────────────────▼────┼────────────────────────────────┼─▼─────────────────────────────┐
    │ core/      decides: │                                │        one actor (host.py)    │ ◄ client.py: DistQueue
    │   samples/    SampleTable: columns held, versions, leases, groups, endings           │   local.py: LocalQueue,
    │   segments.py    which segment lies in which file of which shard                     │     the same in one process
    │   journal.py     every change on disk before it is acknowledged                      │   stream.py: a data loader
    └─────────────────────┼────────────────────────────────┼───────────────────────────────┘   show.py: what waits for
                          ▼                                │ payload                             what, on a terminal
      payload/    a shard a node (fleet.py): segments in shared memory, mapped by the processes of that node, and from
                  there into memory of the reader's own, each byte copied once

    packed.py, column.py    PackedBatch of Columns: one buffer and one offsets table each, samples are views
    steps.py                a client's call as steps, driven by threads and by coroutines alike
    hierarchy/              one read for the ranks that need the same samples, then a broadcast among them
    messages.py             metadata as bare bytes: no pickle, no padding
    checkpoint.py           all of it as it was at one instant, in a folder, for another queue to go on from

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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
