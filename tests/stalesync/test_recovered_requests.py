"""What the controller finds in the queue of the requests of an engine that has died."""

from types import SimpleNamespace

import torch

from distqueue import LocalQueue, PackedBatch
from fusion.rollout.types import SuspendedSample, row_of
from stalesync.loop.engines import Engines
from stalesync.loop.groups import Groups
from stalesync.policy.admission import Admission
from stalesync.policy.commands import AdmitGroups, AwaitSamples
from stalesync.policy.staleness import StalenessLedger
from tests.stalesync.fake_cluster import share_of, spec_of

SIZE = 6


def _put(queue, id, column="partial_response"):
    groups = ["g0"] if column == "response" else ()
    queue.put(PackedBatch.from_samples([id], {column: [torch.arange(3)]}, groups=groups))


def _generating(admission):
    """Goes on until one engine has all requests of one group."""
    for command in admission.step(9, share_of([0])):
        if isinstance(command, AdmitGroups):
            admission.observe_admitted({f"g{k}": 3 for k in range(command.count)})
        if isinstance(command, AwaitSamples):
            return


def test_requests_go_on_with_what_the_queue_holds_and_no_row_is_left_behind():
    queue, lines, started = LocalQueue(["train"]), [], []
    spec = spec_of("separate", group_size=SIZE, ahead=True, chunk_tokens=4, engine_slots=SIZE)
    admission = Admission(spec, StalenessLedger(1, 1))
    _generating(admission)
    running = [entry for entry in admission.buffer.of("running") if entry.group == "g0"]
    finished, kept, older, newer, lost, new = (entry.id for entry in running)
    for id in (kept, older, newer):  # after a first chunk, all are on the engine again
        _put(queue, row_of(id, 4))
        admission.observe_chunks_ended(0, [SuspendedSample(id, 4, row_of(id, 4), (0, 0))])
    list(admission.feed())
    assert admission.buffer.entries[newer].engine == 0 and admission.buffer.entries[newer].generated == 4
    # What the controller has not heard of: the end of a sample and of two chunks, and that a sample is lost.
    _put(queue, finished, "response")
    _put(queue, row_of(finished, 4))
    _put(queue, row_of(older, 8))
    _put(queue, row_of(newer, 8))
    queue.drop([row_of(newer, 4)], "resumed")
    queue.put(PackedBatch((lost,), {}, ("g0",)))
    queue.lose([lost], "earlier tokens")
    prompts = {
        entry.group: SimpleNamespace(id=entry.group, ids=(1, 2, 3)) for entry in admission.buffer.entries.values()
    }
    folder, algorithm = SimpleNamespace(), SimpleNamespace()
    groups = Groups(SIZE, admission=admission, prompts=prompts, algorithm=algorithm, queue=queue, folder=folder)
    engines = Engines(
        spec=None,
        cards=SimpleNamespace(take_dead=lambda: {0: "rank 1 died"}, restart=lambda *which: started.append(which)),
        queue=queue,
        admission=admission,
        groups=groups,
        generation=SimpleNamespace(forget=lambda engine: None, publishing=False),
        step_metrics=SimpleNamespace(metrics=SimpleNamespace(add=lambda *_, **__: None)),
        note=lines.append,
    )
    engines.observe()
    entries = admission.buffer.entries
    assert {entry.id for entry in entries.values() if entry.state == "running"} == {finished}
    assert entries[lost].state == "finished", "it would not be stored again"
    assert [(entries[id].state, entries[id].earlier) for id in (kept, older, newer, new)] == [
        ("waiting", row_of(kept, 4)),
        ("waiting", row_of(older, 8)),
        ("waiting", row_of(newer, 8)),
        ("waiting", ""),
    ]
    assert sorted(queue.holding("partial_response")) == sorted([row_of(kept, 4), row_of(older, 8), row_of(newer, 8)])
    assert "(20 tokens kept)" in lines[0] and 0 not in admission.running
    for restart in engines._restarts.values():
        restart.started.result()
    assert started == [(0, 1)]
