"""Sample as the embedded engine does, in place of vLLM's sampler.

A token's noise is keyed by (run seed, request, position), so the tokens are those that the embedded engine samples
from the same logits; log-probabilities are those of the distribution that was sampled from, whose kept ids are recorded
with the tokens. vLLM for Ascend computes neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fusion.inference.drawing import noise_of
from fusion.inference.sampler import sample
from fusion.inference.sequence import Sequence


class KeyedSampler(nn.Module):
    """Stand in for `model_runner.sampler`. Imported and created only where vLLM is installed.

    Attributes:
        sampled: logprob and kept ids (`Sampled`) of each token of the last call, by request id; requests without a
            token are left out.
    """

    def __init__(self, runner: Any, sequences: Mapping[str, Sequence], seed: int):
        super().__init__()
        self._runner, self._sequences, self._seed = runner, sequences, seed
        self.sampled: dict[str, tuple[float, bytes]] = {}

    def forward(self, logits: torch.Tensor, sampling_metadata: Any = None, **_: Any) -> Any:
        """Return vLLM's `SamplerOutput` with a token for every row of ``logits``: 0 where a prompt is not complete yet,
        which the runner discards."""
        from vllm.v1.outputs import SamplerOutput

        batch = self._runner.input_batch
        names, partial = batch.req_ids[: batch.num_reqs], self._runner.discard_request_mask.np[: batch.num_reqs]
        rows = np.flatnonzero(~partial)
        sampled = torch.zeros(len(names), 1, dtype=torch.int32)
        self.sampled = {}
        if len(rows):
            sequences = [self._sequences[names[row]] for row in rows]
            chosen = logits if len(rows) == len(names) else logits[torch.from_numpy(rows).to(logits.device)]
            drawn = sample(chosen, [seq.params for seq in sequences], noise_of(sequences, self._seed))
            sampled[torch.from_numpy(rows), 0] = torch.tensor(drawn.tokens, dtype=torch.int32)
            values = zip(drawn.logprobs, drawn.kept or [b""] * len(rows), strict=True)
            self.sampled = dict(zip((seq.request.id for seq in sequences), values, strict=True))
        return SamplerOutput(sampled_token_ids=sampled.to(logits.device), logprobs_tensors=None)
