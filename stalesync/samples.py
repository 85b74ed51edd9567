"""Define a sample in the controller: ids, lengths, versions, text, reward, but no tokens. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.rewards import RewardOutcome
from stalesync.prompts import Prompt


@dataclass(frozen=True)
class GeneratedSample:
    """A finished response that is not scored yet. ``id``: of its row in the queue; ``versions``: policy versions of the
    oldest and the newest token."""

    id: str
    prompt: Prompt
    response: str
    prompt_tokens: int
    response_tokens: int
    versions: tuple[int, int] = (0, 0)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def scored(self, outcome: RewardOutcome) -> ScoredSample:
        """Returns this sample with its reward."""
        oldest, newest = self.versions
        return ScoredSample(
            id=self.id,
            prompt=self.prompt,
            response=self.response,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            outcome=outcome,
            oldest=oldest,
            newest=newest,
        )


@dataclass(frozen=True)
class ScoredSample:
    """A finished response and its reward. ``oldest``, ``newest``: policy versions of its tokens. Checkpoints
    store these fields by name."""

    id: str
    prompt: Prompt
    response: str
    prompt_tokens: int
    response_tokens: int
    outcome: RewardOutcome
    oldest: int = 0
    newest: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens
