"""Select some cards of a run, to call their stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate

from stalesync.cards.card import Card
from stalesync.cards.stage_calls import Params, Result, RunningStage, stage_call

if TYPE_CHECKING:
    from stalesync.cards.cards import Cards


class CardGroup:
    """Some cards of a run (`Cards.on`)."""

    def __init__(self, cards: Cards, ranks: Sequence[int]):
        self._cards, self._ranks = cards, tuple(ranks)

    def call(
        self, stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> list[Result]:
        """Run a stage on these cards at once; return the results by rank.

        Raises:
            CardFailed: a card raised, died or timed out, in this stage or in another one in progress. Of several
                failures, the root cause is named.
            QueueFailed: likewise, as the queue has ended.
            EnginesLost: cards of this stage have died, and their engines are replaced.
        """
        return self._cards.wait(self.begin(stage, *args, **kwargs))

    def begin(
        self, stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> RunningStage[Result]:
        """Start a stage and return at once; `Cards.wait` waits for it."""
        call = stage_call(stage, *args, **kwargs)
        return self._cards.begin_each({rank: call for rank in self._ranks})

    def ask(
        self, request: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> list[Result]:
        """Send a control call to these cards, which answer while a stage runs; return the answers by rank.

        Raises:
            CardFailed: a card raised, is dead, or does not answer. If the stage that it runs has failed, too, that is
                named.
        """
        call = stage_call(request, *args, **kwargs)
        return self._cards.ask_each({rank: call for rank in self._ranks})
