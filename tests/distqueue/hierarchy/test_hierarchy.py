"""Groups of ranks read once: what each of them gets, what leaves the queue, and what travels between them."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distqueue import LocalQueue, PackedBatch, QueueClosed, SamplesLost
from distqueue.hierarchy import GroupReader, Received
from distqueue.hierarchy.exchange import INITIAL_METADATA_BYTES
from distqueue.hierarchy.tree import Member
from fusion.model import Parallel
from tests.distqueue.hierarchy.reads import flat_reads, leader_reads, requests
from tests.helpers import run_ranks
from tests.machine import patience

LAYOUT = Parallel(8, tp=2, pp=2)
NEEDS = [("prompt", "response"), ("response", "logprobs", "advantage", "answer")]
"""Of the first stage and of the last."""

IDS = [f"sample {number}" for number in range(6)]


class CountingQueue:
    """A real queue, and what left it."""

    def __init__(self):
        random = torch.Generator().manual_seed(3)
        sizes = [3, 0, 7, 1, 4, 2]
        self.queue, self.requests, self.nbytes = LocalQueue(["train"]), 0, 0
        self.whole = PackedBatch.from_samples(
            IDS,
            {
                "prompt": [torch.randint(99, (size + 1,), generator=random) for size in sizes],
                "response": [torch.randint(99, (size,), generator=random) for size in sizes],
                "logprobs": [torch.randn(size, generator=random).to(torch.bfloat16) for size in sizes],
                "mask": [torch.rand(size, 2, generator=random) > 0.5 for size in sizes],
                "advantage": torch.randn(6, generator=random),
                "answer": ["sieben", "", "8", "9", "10", "11"],
                "facts": [{"n": number} for number in range(6)],
            },
            groups=["a", "a", "b", "b", "c", "c"],
            versions=[(number // 2, number) for number in range(6)],
        )
        self.queue.put(self.whole)

    def read(self, ids, columns):
        self.requests += 1
        batch = self.queue.read(ids, columns)
        self.nbytes += batch.nbytes
        return batch


def same(found: PackedBatch, wanted: PackedBatch) -> bool:
    """To the bit, with all that is known of the samples."""
    for known in ("ids", "groups", "versions"):
        assert getattr(found, known) == getattr(wanted, known)
    assert list(found.columns) == list(wanted.columns)
    for name, column in wanted.columns.items():
        assert found[name].layout == column.layout, name
        assert torch.equal(found[name].buffer, column.buffer) and torch.equal(found[name].lengths(), column.lengths())
    return True


def replica_of(rank):
    """(its process group, its ranks). Collective."""
    groups: dict[int, list[int]] = {}
    for other in range(LAYOUT.world):
        groups.setdefault(LAYOUT.coordinate("dp", other), []).append(other)
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups.values()}
    return next((group, ranks) for ranks, group in made.items() if rank in ranks)


def _read(rank, device):
    group, ranks = replica_of(rank)
    queue, mine = CountingQueue(), NEEDS[LAYOUT.coordinate("pp", rank)]
    reader = GroupReader(queue, group, mine)
    for ids in (IDS[4::-1], ["sample 1"]):
        delivery = reader.read(ids)
        assert same(delivery.batch, queue.queue.read(ids, mine))
        assert sorted(delivery.lengths) == ["advantage", "answer", "logprobs", "prompt", "response"]
        for name, lengths in delivery.lengths.items():
            assert torch.equal(lengths, queue.queue.read(ids, [name])[name].lengths()), name
    flat = CountingQueue()
    for ids in (IDS[4::-1], ["sample 1"]):
        flat.read(ids, mine)
    assert reader.requests == queue.requests
    return queue.requests, queue.nbytes, flat.requests, flat.nbytes


def test_requests_fall_to_one_of_every_tp_times_pp_ranks_and_every_rank_gets_its_columns():
    counts = run_ranks(_read, 8)
    leader_requests, leader_bytes, flat_requests, flat_bytes = map(sum, zip(*counts, strict=True))
    assert (flat_requests, leader_requests) == (2 * 8, 2 * 2) == tuple(2 * n for n in requests(8, 4))
    assert [count[0] for count in counts] == [2, 0, 2, 0, 0, 0, 0, 0], "only the leaders ask"
    queue = CountingQueue().queue
    members = [Member(rank, "", frozenset(NEEDS[rank // 2])) for rank in range(4)]
    flat, leader = 0, 0
    for ids in (IDS[4::-1], ["sample 1"]):
        sizes = {name: queue.read(ids, [name]).nbytes for name in {*NEEDS[0], *NEEDS[1]}}
        flat += 2 * flat_reads(members, sizes).nbytes
        leader += 2 * leader_reads(members, sizes).nbytes
    assert (flat_bytes, leader_bytes) == (flat, leader), "what was counted is what the plan says"
    assert leader_bytes < 0.5 * flat_bytes


def _fail(rank, device):
    group, ranks = replica_of(rank)
    queue = CountingQueue()
    reader = GroupReader(queue, group, NEEDS[LAYOUT.coordinate("pp", rank)])
    errors = []
    for call in (
        lambda: reader.read(["sample 7"]),
        lambda: (queue.queue.lose(IDS[:2], "gone"), reader.read(IDS)),
        lambda: (queue.queue.close(), reader.read(["sample 1"])),
    ):
        try:
            call()
        except (ValueError, QueueClosed) as error:
            errors.append((type(error), str(error), getattr(error, "ids", None)))
    return queue.requests, errors


def test_errors_of_the_leader_are_everybodys():
    ranks = run_ranks(_fail, 8)
    assert [count for count, _ in ranks] == [3, 0, 3, 0, 0, 0, 0, 0]
    kinds, texts, lost = zip(*ranks[7][1], strict=True)
    assert kinds == (ValueError, SamplesLost, QueueClosed) and lost[1] == tuple(IDS[:2])
    assert all(errors == ranks[0][1] for _, errors in ranks), "the same type, the same words"
    assert "sample 7" in texts[0] and "sample 0" in texts[1] and "closed" in texts[2]


PLACED = ["here", "there", "there", "here", "there"]
PLACED_NEEDS = [("prompt",), ("mask", "logprobs", "answer"), ("facts",), (), ("logprobs", "prompt")]
PLACED_UNION = ["answer", "facts", "logprobs", "mask", "prompt"]


def _two_machines(rank, device):
    """What every rank sent, by whom to, in two reads."""
    group = dist.new_group(list(range(5)), backend="gloo")
    queue = CountingQueue()
    reader = GroupReader(queue, group, PLACED_NEEDS[rank], place=PLACED[rank])
    for ids in (IDS, IDS[::-2]):
        delivery = reader.read(ids)
        assert same(delivery.batch, queue.queue.read(ids, PLACED_UNION).select(columns=PLACED_NEEDS[rank]))
        assert sorted(delivery.lengths) == PLACED_UNION
    return reader.sent_messages, reader.sent_bytes, reader.tree


def test_the_slow_link_is_crossed_once_a_message():
    ranks = run_ranks(_two_machines, 5)
    tree = ranks[0][2]
    assert all(found == tree for _, _, found in ranks)
    crossing = {(edge.parent, edge.child) for edge in tree.edges if PLACED[edge.parent] != PLACED[edge.child]}
    assert crossing == {(0, 1)}, "one relay, the one that needs most"
    dtypes = {"prompt": "int64", "mask": "bool", "logprobs": "bfloat16", "answer": "uint8", "facts": "uint8"}
    reads, sent = 2, 0
    queue = CountingQueue().queue
    for edge in tree.edges:
        messages = 1 + len({dtypes[name] for name in edge.columns})
        assert ranks[edge.parent][0][edge.child] == reads * messages, edge
        for ids in (IDS, IDS[::-2]):
            columns = queue.read(ids, PLACED_UNION).select(columns=sorted(edge.columns)).columns.values()
            sent += INITIAL_METADATA_BYTES + sum(column.buffer.nbytes for column in columns)
    assert sum(found for _, found, _ in ranks) == sent, "payload without a byte of padding"


def _many(rank, device):
    queue = CountingQueue()
    ids = [f"a sample with quite a long name, {number}" for number in range(300)]
    groups = [str(number // 2) for number in range(300)]
    queue.queue.put(PackedBatch.from_samples(ids, {"prompt": [torch.arange(n % 7) for n in range(300)]}, groups))
    reader = GroupReader(queue, dist.new_group([0, 1, 2]), ["prompt"])
    messages = []
    for _ in range(2):
        assert same(reader.read(ids).batch, queue.queue.read(ids, ["prompt"]))
        messages.append(dict(reader.sent_messages))
    return messages


def test_metadata_that_outgrows_its_message_does_so_once():
    first, *_ = run_ranks(_many, 3)
    assert [sum(sent.values()) for sent in first] == [3, 3 + 2], "two of metadata, one of payload; then one of each"


def _left_alone(rank, device, leader_stays_s):
    timeout = timedelta(seconds=leader_stays_s / 3)
    reader = GroupReader(CountingQueue(), dist.new_group([0, 1], timeout=timeout), ["prompt"])
    if rank == 0:
        time.sleep(leader_stays_s)
        return None
    began_s = time.monotonic()
    with pytest.raises(ConnectionError):
        reader.read(IDS)
    return time.monotonic() - began_s


def test_a_rank_whose_leader_never_reads_does_not_wait_for_ever():
    leader_stays_s = patience(1.5)
    assert run_ranks(_left_alone, 2, leader_stays_s)[1] < leader_stays_s


def _failing_backend(rank, device):
    """The errors that ranks get if their backend fails where a message is posted, awaited, or all rows are gathered."""
    group, queue = dist.new_group([0, 1]), CountingQueue()
    reader = GroupReader(queue, group, ["prompt"])
    caught = []

    def fail(*args, **kwargs):
        raise RuntimeError("the peer has left")

    waiting = [SimpleNamespace(wait=fail)]
    for name, replacement, call in (
        ("batch_isend_irecv", fail, lambda: reader.read(IDS)),
        ("batch_isend_irecv", lambda posts: waiting, lambda: reader.read(IDS)),
        ("all_gather_into_tensor", fail, lambda: GroupReader(queue, group, ["prompt"])),
    ):
        own = getattr(dist, name)
        setattr(dist, name, replacement)
        try:
            call()
        except Exception as raised:
            caught.append(type(raised))
        finally:
            setattr(dist, name, own)
    return caught


def test_a_backend_that_fails_is_a_lost_connection():
    assert run_ranks(_failing_backend, 2) == [[ConnectionError] * 3] * 2


def test_one_process_is_a_group_of_its_own():
    queue = CountingQueue()
    reader = GroupReader(queue, None, ["response", "mask"])
    delivery = reader.read(IDS)
    assert same(delivery.batch, queue.whole.select(columns=["response", "mask"]))
    assert sorted(delivery.lengths) == ["mask", "response"]
    assert (reader.requests, reader.sent_bytes) == (1, 0)
    with pytest.raises(QueueClosed):
        queue.queue.close()
        reader.read(IDS)
    assert same(Received.of(queue.whole).batch, queue.whole)
