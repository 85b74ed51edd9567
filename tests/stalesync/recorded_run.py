"""A run as `scripts/train.py` starts it, whose card that trains records what it has trained.

    python tests/stalesync/recorded_run.py FOLDER overrides …

FOLDER/1.pt, …: of every part of a step, in order, `ids` of its samples by optimizer step; `update`: whether it is the
last; `columns` of its samples by name and id; and `weights` by name after it. Of a run in which one card trains.
"""

import sys
from pathlib import Path

import torch

from stalesync.cards import actors

COLUMNS = ("prompt", "response", "behaviour_logprobs", "versions", "advantage")


class RecordingCard(actors.Card):
    folder, num_parts = "", 0

    def train(self, minibatches, version=None, update=True):
        batch = self.queue.read([id for ids in minibatches for id in ids], COLUMNS)
        report = super().train(minibatches, version=version, update=update)
        columns = {
            name: dict(zip(batch.ids, batch[name].buffer.split(batch[name].lengths().tolist()), strict=True))
            for name in COLUMNS
        }
        weights = {name: one.detach().cpu().clone() for name, one in self.card.trainer.model.named_parameters()}
        self.num_parts += 1
        found = {"ids": minibatches, "update": update, "columns": columns, "weights": weights}
        torch.save(found, Path(self.folder) / f"{self.num_parts}.pt")
        return report


if __name__ == "__main__":
    sys.path.insert(0, "scripts")
    import train

    RecordingCard.folder, plain, actors.Card = sys.argv.pop(1), actors.Card, RecordingCard
    try:
        train.main()
    finally:  # other runs may follow in this process
        actors.Card = plain
