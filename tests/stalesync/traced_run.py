"""A run as `scripts/train.py` starts it, in which every message that concerns samples is noted, by all processes.

    python tests/stalesync/traced_run.py TRACE.jsonl overrides …

A line a message: `from`, `to`, `what`, and the `ids` of its samples, in the order in which the messages were sent: the
controller notes what it sends to cards and to processes of rewards, the queue's actor every call that names samples.
"""

import json
import sys

from distqueue.actor import QueueActor
from distqueue.messages import Delivery, Put


def note(path, sender, receiver, what, ids):
    with open(path, "a") as file:
        file.write(json.dumps({"from": sender, "to": receiver, "what": what, "ids": list(ids)}) + "\n")


class TracedActor(QueueActor):
    path = ""

    async def commit(self, *, number, message, **options):
        put = self.core.writers.reserved[number].put if message is None else Put.from_bytes(message)
        answer = await super().commit(number=number, message=message, **options)
        sender = "controller" if "advantage" in put.columns else "worker"
        note(self.path, sender, "queue", " ".join([*put.columns, put.claim]).strip(), put.ids)
        return answer

    async def get(self, *, selection, **options):
        answer = await super().get(selection=selection, **options)
        if isinstance(answer, bytes):
            note(self.path, "queue", "controller", selection.task, Delivery.from_bytes(answer).ids)
        return answer

    async def locate(self, ids, columns, **options):
        answer = await super().locate(ids, columns, **options)
        note(self.path, "queue", "worker", " ".join(columns), ids)
        return answer

    async def change(self, method, *args):
        answer = await super().change(method, *args)
        if method in ("ack", "ack_with_stats"):
            note(self.path, "controller", "queue", f"ack {args[0]}", args[1])
        return answer


def trace(path):
    import distqueue.client
    from stalesync.cards.cards import Cards
    from stalesync.scoring.sources import RuleReward

    TracedActor.path, distqueue.client.QueueActor = path, TracedActor
    begin, score = Cards.begin_each, RuleReward.__call__

    def traced_begin(self, calls):
        for call in calls.values():
            if call.stage == "generate":
                note(path, "controller", "worker", call.stage, [one.id for one in call.args[0]])
            elif call.stage in ("train", "reference"):
                ids = call.args[0] if call.stage == "reference" else [id for ids in call.args[0] for id in ids]
                note(path, "controller", "worker", call.stage, ids)
        return begin(self, calls)

    def traced_score(self, samples):
        ids = [sample.id for sample in samples]
        note(path, "controller", "reward process", "score", ids)
        outcomes = score(self, samples)
        note(path, "reward process", "controller", "outcome", ids)
        return outcomes

    Cards.begin_each, RuleReward.__call__ = traced_begin, traced_score


if __name__ == "__main__":
    sys.path.insert(0, "scripts")
    import train

    trace(sys.argv.pop(1))
    train.main()
