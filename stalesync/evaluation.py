"""Evaluate held-out prompts before the first step and after the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion.rollout import EvalAnswer
from fusion.telemetry import Answer, compare
from stalesync.prompts import Prompt
from stalesync.scoring import Scorer


@dataclass
class Evaluation:
    """Holds the evaluations. ``rewards``: mean reward by time (`before`, `after`); ``rows``: prompt, response and
    reward of each answer."""

    prompts: Sequence[Prompt]
    rewards: dict[str, float] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def score(self, scorer: Scorer, answers: Mapping[str, EvalAnswer], when: str) -> None:
        """Scores one answer for each prompt, by the prompt's id."""
        outcomes = scorer.score_answers(self.prompts, answers)
        self.rows[when] = [
            {"prompt": prompt.text, "response": text, "reward": outcome.reward}
            for prompt, (text, outcome) in zip(self.prompts, outcomes, strict=True)
        ]
        rewards = [outcome.reward for _, outcome in outcomes if outcome.reward is not None]
        if rewards:
            self.rewards[when] = sum(rewards) / len(rewards)

    def metrics(self, when: str) -> dict[str, float]:
        """Returns `val/rewards/<when>`, if any answer could be scored."""
        return {f"val/rewards/{when}": self.rewards[when]} if when in self.rewards else {}

    def answers(self) -> list[Answer]:
        """Returns pairs of answers before and after training."""
        return compare(self.rows.get("before", []), self.rows.get("after", []))

    def notes(self) -> list[str]:
        """Returns the rewards before and after in one line, if there are any."""
        rewards = ", ".join(f"{reward:.3f} {when}" for when, reward in self.rewards.items())
        return [f"reward on held-out prompts: {rewards} (val/rewards)"] if rewards else []
