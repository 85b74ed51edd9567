"""Exchange text with the drafters of other engines: asynchronously, in batches, beside the steps of the engine.

    first rank of a schedule   step: texts ─► message ─ thread ─► store of the run ─ reply ─► next step: `drafts_update`
    its other TP ranks, stages       ◄─ the same update at the same step (`ControlChannel.spread`) ─┘

A step only prepares a message and takes over a reply that has arrived; a store that does not answer is never waited
for. If it has ended or fails, the engine drafts from its own text from then on: this is logged once, and counted."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fusion.rollout.drafts.pieces import TextPiece, compress, decode, decompress, encode
from fusion.rollout.drafts.text_client import TextClient
from fusion.rollout.drafts.text_store import TextStore

log = logging.getLogger(__name__)
INTERVAL_S = 0.2
"""Seconds between two messages of an engine; a quarter of it before one that asks for a prompt for the first time"""
MESSAGES_PER_S = 400
"""Maximum of all engines together: the store is one process"""
HANGING_S = 30.0
"""A store that has not answered for so long is reported, once."""
MAX_STEP_TOKENS = 4096
"""Tokens of others that one step reads: about 1 ms"""


def answer(store: TextStore, request: bytes) -> bytes:
    """Answer a message of a `TextExchange`. Raise ValueError if the message is malformed."""
    header, pieces = decode(decompress(request))
    cursors = {bytes.fromhex(prompt): cursor for prompt, cursor in header["cursors"].items()}
    reply = store.exchange(header["writer"], header["version"], cursors, pieces)
    return compress(
        encode(
            {
                "cursors": {prompt.hex(): cursor for prompt, cursor in reply.cursors.items()},
                "behind": reply.behind,
                "dropped": store.totals.dropped,
                "expired": store.totals.expired,
                "nbytes": store.nbytes,
            },
            reply.pieces,
        )
    )


@dataclass
class ExchangeTotals:
    """Since construction. ``sent_bytes``, ``received_bytes``: as they travel; ``received_tokens``: of others;
    ``seconds``: that steps of the engine spent on it; ``failures``: 1 if the store has ended or failed. Of the whole
    store: ``dropped``, ``expired`` (`StoreTotals`) and ``store_bytes``, as of the last reply."""

    messages: int = 0
    sent_bytes: int = 0
    sent_tokens: int = 0
    received_bytes: int = 0
    received_tokens: int = 0
    seconds: float = 0.0
    failures: int = 0
    dropped: int = 0
    expired: int = 0
    store_bytes: int = 0


class TextExchange:
    """One writer's connection to the store of the run. Used only by the thread that steps the engine. ``call``: sends a
    message to the store and returns its reply; may block, on a thread of its own; ``writer``: its number in the run, of
    ``num_writers``; ``clock``: seconds, for the times of messages."""

    def __init__(
        self, call: Callable[[bytes], bytes], writer: int, num_writers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call, self._writer, self._clock = call, writer, clock
        self._interval_s = max(INTERVAL_S, num_writers / MESSAGES_PER_S)
        self._sent_s = -math.inf
        self.totals = ExchangeTotals()
        self.client: TextClient | None = TextClient()
        """None: the store has ended or failed"""
        self._thread: threading.Thread | None = None
        """Thread of the message under way"""
        self._reply: tuple[dict[str, Any], list[TextPiece]] | Exception = ({}, [])
        self._reported_hang = False
        self._unread: deque[TextPiece] = deque()

    def drafts_update(self, running: Collection[bytes], version: int) -> bytes:
        """Return pieces of others that this step reads, encoded; b"": none. Take over a reply that has arrived, and
        send the next message if it is due. ``running``: the prompts with running requests; ``version``: the policy
        version of the engine."""
        began_s = self._clock()
        if self._thread is not None:
            self._take_reply(began_s)
        elif self.client is not None and self._is_due(self.client, running, began_s):
            self._send(self.client, running, version)
        pieces = self._next_pieces()
        self.totals.seconds += self._clock() - began_s
        return encode({}, pieces) if pieces else b""

    def flush(self, version: int) -> None:
        """Send what others do not know yet, unless a message is under way: the engine makes no step for some time."""
        if self._thread is not None:
            self._take_reply(self._clock())
        if self._thread is None and self.client is not None:
            self._send(self.client, (), version)

    def _is_due(self, client: TextClient, running: Collection[bytes], now_s: float) -> bool:
        waited_s = now_s - self._sent_s
        return waited_s >= self._interval_s or (waited_s >= self._interval_s / 4 and client.is_new(running))

    def _send(self, client: TextClient, running: Collection[bytes], version: int) -> None:
        self._sent_s = self._clock()
        message = client.take(running)
        if not message:
            return
        self.totals.sent_tokens = client.sent_tokens
        cursors = {prompt.hex(): cursor for prompt, cursor in message.cursors.items()}
        header = {"writer": self._writer, "version": version, "cursors": cursors}
        self._thread = threading.Thread(target=self._ask, args=(header, message.pieces), name="drafts", daemon=True)
        self._thread.start()

    def _ask(self, header: dict[str, Any], pieces: list[TextPiece]) -> None:
        try:
            message = compress(encode(header, pieces))
            reply = self._call(message)
            self.totals.sent_bytes += len(message)
            self.totals.received_bytes += len(reply)
            self._reply = decode(decompress(reply))
        except Exception as error:  # whatever it is, the run continues without
            self._reply = error

    def _take_reply(self, now_s: float) -> None:
        assert self._thread is not None
        if self._thread.is_alive():
            if now_s - self._sent_s > HANGING_S and not self._reported_hang:
                self._reported_hang = True
                log.warning("drafts: the store of the engines' text has not answered for %.0f s", HANGING_S)
            return
        self._thread = None
        if isinstance(self._reply, Exception):
            self.totals.failures, self.client = 1, None
            log.warning("drafts: no text of other engines from now on: %s", self._reply)
            return
        header, pieces = self._reply
        assert self.client is not None
        self.client.observe({bytes.fromhex(key): at for key, at in header["cursors"].items()}, header["behind"])
        totals = self.totals
        totals.messages += 1
        totals.received_tokens += sum(len(piece.tokens) for piece in pieces)
        totals.dropped, totals.expired, totals.store_bytes = (header[name] for name in ("dropped", "expired", "nbytes"))
        self._unread += pieces

    def _next_pieces(self) -> list[TextPiece]:
        pieces, left = list[TextPiece](), MAX_STEP_TOKENS
        while self._unread and left:
            piece, rest = self._unread.popleft().split(left)
            pieces.append(piece)
            left -= len(piece.tokens)
            if rest.tokens:
                self._unread.appendleft(rest)
        return pieces
