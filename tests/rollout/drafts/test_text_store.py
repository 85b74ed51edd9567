"""The text of a run's engines in one store: complete for every reader whoever leaves, bounded, and counted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.rollout.drafts import text_store
from fusion.rollout.drafts.pieces import TextPiece, compress, decode, decompress, encode
from fusion.rollout.drafts.text_client import TextClient
from fusion.rollout.drafts.text_store import TextStore

PROMPTS = [b"p" * 16, b"q" * 16]


def piece(request: str, start: int, *tokens: int, prompt: bytes = PROMPTS[0], group: str = "g") -> TextPiece:
    return TextPiece(prompt, group, request, start, array("i", tokens))


@dataclass
class Engine:
    """What a drafter does with a client, without an index; it has none after a lost message (`TextExchange`)."""

    number: int
    client: TextClient | None = field(default_factory=TextClient)
    texts: dict[tuple[bytes, str], array] = field(default_factory=dict)

    def generate(self, prompt: bytes, request: str, response: list[int], new: list[int]) -> None:
        key = prompt, request
        if list(self.texts.get(key, ())) != response[: len(self.texts.get(key, ()))]:
            self.texts[key] = array("i")
        text = self.texts.setdefault(key, array("i"))
        text.extend(response[len(text) :] + new)
        if self.client is not None:
            self.client.note(prompt, "g", request, text, known=len(response))

    def exchange(self, store: TextStore, asks: list[bytes], lost: str = "") -> None:
        if self.client is None:
            return
        message = self.client.take(asks)
        if lost != "request":
            reply = store.exchange(self.number, 0, message.cursors, message.pieces)
        if lost:
            self.client = None
            return
        self.client.observe(reply.cursors, reply.behind)
        for one in reply.pieces:
            text = self.texts.setdefault((one.prompt, one.request), array("i"))
            assert one.start <= len(text), "pieces join what was there"
            if text[one.start : one.end] != one.tokens[: len(text) - one.start]:
                text = self.texts[one.prompt, one.request] = text[: one.start]
            text.extend(one.tokens[len(text) - one.start :])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("generate"), st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=5)),
        st.tuples(st.just("exchange"), st.integers(0, 2), st.sampled_from([*[""] * 8, "request", "reply"]), st.none()),
        st.tuples(st.just("again"), st.integers(0, 3), st.none(), st.none()),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 6))
@settings(max_examples=400, deadline=None)
def test_every_engine_that_exchanges_has_every_text_of_the_others(done, marks):
    """Requests move from engine to engine with the tokens that they have; one may be generated again from the start."""
    before, text_store.MAX_MARKS = text_store.MAX_MARKS, marks
    try:
        store, engines = TextStore(1 << 30), [Engine(i) for i in range(3)]
        said: list[list[int]] = [[] for _ in range(4)]
        writers = [engines[0]] * 4
        times = [0] * 4
        for name, who, what, tokens in done:
            if name == "generate" and tokens and (engines[who].client is not None or not times[what]):
                tokens = [10 * times[what] + token for token in tokens]
                engines[who].generate(PROMPTS[what % 2], f"r{what}", said[what], tokens)
                said[what], writers[what] = said[what] + tokens, engines[who]
                for _ in range(2 if times[what] else 0):  # what is said again arrives before the request moves on
                    engines[who].exchange(store, PROMPTS)
            elif name == "exchange":
                engines[who].exchange(store, PROMPTS, lost=what)
            elif name == "again" and said[who]:
                for engine in engines * 3:  # what was said before does not arrive after what is said now
                    engine.exchange(store, PROMPTS)
                said[who], times[who] = [], times[who] + 1
        for _ in range(4):  # a writer that is behind, then the one that it waits for, then all read
            for engine in engines:
                engine.exchange(store, PROMPTS)
        exchanging = [engine for engine in engines if engine.client is not None]
        for number, text in enumerate(said):
            for engine in exchanging if text and writers[number] in exchanging else ():
                assert list(engine.texts[PROMPTS[number % 2], f"r{number}"]) == text
    finally:
        text_store.MAX_MARKS = before


def test_only_what_is_new_and_of_others_is_sent():
    store, (one, two) = TextStore(1 << 30), (Engine(0), Engine(1))
    one.generate(PROMPTS[0], "a", [], [1, 2, 3])
    one.exchange(store, PROMPTS)
    two.exchange(store, PROMPTS)
    one.generate(PROMPTS[0], "a", [1, 2, 3], [4])
    for engine in (one, two, one, two):
        engine.exchange(store, PROMPTS)
    assert (one.client.sent_tokens, store.totals.received_tokens, store.totals.sent_tokens) == (4, 4, 4)
    two.exchange(store, [])
    assert store.totals.sent_tokens == 4


def test_a_store_that_has_lost_a_text_gets_it_again():
    one, two = Engine(0), Engine(1)
    one.generate(PROMPTS[0], "a", [], [1, 2, 3])
    one.exchange(TextStore(1 << 30), PROMPTS)
    store = TextStore(1 << 30)
    one.generate(PROMPTS[0], "a", [1, 2, 3], [4])
    one.exchange(store, PROMPTS)
    assert PROMPTS[0] not in store._prompts
    one.exchange(store, PROMPTS)
    two.exchange(store, PROMPTS)
    assert list(two.texts[PROMPTS[0], "a"]) == [1, 2, 3, 4]


def test_of_a_prompt_the_last_groups_are_kept():
    for groups, expected in ((1, ["g2"]), (2, ["g1", "g2"])):
        store = TextStore(1 << 30, max_groups=groups)
        for name in ("g0", "g1", "g2"):
            store.exchange(0, 0, {}, [piece(f"{name}/0", 0, 1, 2, group=name)])
        assert [one.group for one in store.exchange(1, 0, {PROMPTS[0]: 0}, []).pieces] == expected


stored = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 400)), max_size=60)


@given(stored, st.integers(0, 9000))
@settings(max_examples=200, deadline=None)
def test_the_store_is_bounded_and_counts_its_bytes(pieces, max_bytes):
    store = TextStore(max_bytes)
    for prompt, request, length in pieces:
        key = bytes([prompt]) * 16
        store.exchange(0, 0, {}, [piece(f"r{request}", 0, *range(length), prompt=key, group=f"g{request % 3}")])
        assert store.nbytes <= max_bytes
        held = [text for one in store._prompts.values() for texts in one.groups.values() for text in texts.values()]
        assert store.nbytes == sum(text.nbytes for text in held)
    kept = {prompt for prompt, *_ in pieces if bytes([prompt]) * 16 in store._prompts}
    assert len(kept) >= len({p for p, _, length in pieces if length}) - store.totals.dropped


def test_what_was_used_longest_ago_is_dropped_first():
    store = TextStore(3 * 750)
    keys = [bytes([i]) * 16 for i in range(4)]
    for key in keys[:3]:
        store.exchange(0, 0, {}, [piece("r", 0, *range(20), prompt=key)])
    store.exchange(1, 0, {keys[0]: 0}, [])
    store.exchange(0, 0, {}, [piece("r", 0, *range(20), prompt=keys[3])])
    assert [key in store._prompts for key in keys] == [True, False, True, True] and store.totals.dropped == 1


def test_a_prompt_that_is_not_used_expires():
    store = TextStore(1 << 20, max_age=2)
    keys = [bytes([i]) * 16 for i in range(2)]
    store.exchange(0, 5, {}, [piece("r", 0, 1, prompt=key) for key in keys])
    store.exchange(0, 7, {keys[0]: 0}, [])
    assert all(key in store._prompts for key in keys)
    store.exchange(0, 8, {}, [])
    assert [key in store._prompts for key in keys] == [True, False]
    assert (store.totals.expired, store.totals.dropped) == (1, 0)


def test_a_reply_is_bounded_and_what_is_left_follows(monkeypatch):
    monkeypatch.setattr(text_store, "MAX_REPLY_TOKENS", 3)
    store, reader = TextStore(1 << 20), Engine(1)
    keys = [bytes([i]) * 16 for i in range(3)]
    store.exchange(0, 0, {}, [piece("r", 0, 1, 2, 3, 4, prompt=key) for key in keys])
    for count in (1, 2, 3, 3):
        reader.exchange(store, sorted(keys, key=lambda key: (key, b"r") in reader.texts))
        assert len(reader.texts) == count


pieces = st.lists(
    st.builds(
        TextPiece,
        st.binary(min_size=16, max_size=16),
        st.text(max_size=5),
        st.text(max_size=5),
        st.integers(0, 1 << 40),
        st.lists(st.integers(0, (1 << 31) - 1) | st.integers(0, 300), max_size=9).map(lambda x: array("i", x)),
    ),
    max_size=6,
)


@given(pieces)
def test_messages_are_what_was_encoded(sent):
    header, found = decode(decompress(compress(encode({"a": 1}, sent))))
    assert header == {"a": 1} and found == sent


@given(pieces, st.data())
def test_a_damaged_message_is_refused_or_of_the_same_form(sent, data):
    message = bytearray(encode({}, sent))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(message), bytes(message[:place])):
        try:
            _, found = decode(damaged)
        except ValueError:
            continue
        assert all(isinstance(one, TextPiece) for one in found)


def test_a_damaged_packet_is_refused():
    packed = compress(encode({}, [piece("r", 0, 1, 2)]))
    for damaged in (packed[:-1], packed[:5] + b"x" + packed[6:], b""):
        with pytest.raises(ValueError, match="message between drafters"):
            decode(decompress(damaged))


def test_a_prompt_that_is_dropped_while_it_is_asked_for_is_asked_for_from_the_beginning():
    store, client = TextStore(1 << 20), TextClient()
    store.exchange(0, 0, {}, [piece("r", 0, 1, 2)])
    for dropped in (True, False):
        message = client.take([PROMPTS[0]])
        assert message.cursors == {PROMPTS[0]: 0}
        if dropped:
            client.forget(PROMPTS[0])
        client.observe(store.exchange(1, 0, message.cursors, message.pieces).cursors, {})
        assert client.is_new([PROMPTS[0]]) == dropped
    assert client.take([PROMPTS[0]]).cursors[PROMPTS[0]] > 0
