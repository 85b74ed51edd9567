"""Waiting requests are admitted by priority and in order of arrival, preempted ones first; none is held back."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fusion.inference import Request, SamplingParams
from fusion.inference.blocks import BlockManager
from fusion.inference.scheduler import Scheduler
from fusion.inference.sequence import Sequence
from fusion.inference.waiting import WaitingLine
from tests.inference.engines import by_id, engine, generate, requests

SIZE = 4


def sequence(name, priority=0, length=4, group=""):
    params = SamplingParams(max_tokens=length, stop_token_ids=())
    return Sequence.of(Request(name, (1,), params, group, priority=priority), params, ())


EVENTS = ["come", "come", "preempt", "admit", "remove", "hold", "release"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3))))
def test_the_line_is_that_of_a_plain_list(events):
    line, preempted, came, held = WaitingLine(), [], [], []
    for number, (event, priority) in enumerate(events):
        seq = sequence(f"r{number}", priority)
        if event == "come":
            line.append(seq)
            came.append(seq)
        elif event == "preempt":
            line.appendleft(seq)
            preempted.insert(0, seq)
        elif event == "hold":
            line.held.append(seq)
            held.append(seq)
        elif event == "release":
            line.release(lambda seq, chosen=priority: seq.request.priority == chosen)
            came += [seq for seq in held if seq.request.priority == priority]
            held = [seq for seq in held if seq.request.priority != priority]
        elif event == "remove":
            gone = [seq for seq in preempted + _in_order(came) + held if seq.request.priority == priority]
            assert line.remove(lambda seq, chosen=priority: seq.request.priority == chosen) == gone
            preempted = [seq for seq in preempted if seq not in gone]
            came = [seq for seq in came if seq not in gone]
            held = [seq for seq in held if seq not in gone]
        elif line:
            expected = (preempted + _in_order(came))[0]
            assert line.first is expected and line.popleft() is expected
            (preempted if preempted else came).remove(expected)
        assert list(line) == preempted + _in_order(came) + held and len(line) == len(list(line))
        assert bool(line) == bool(preempted + came)


def _in_order(came):
    return sorted(came, key=lambda seq: seq.request.priority)  # a stable sort


@given(
    lengths=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=12),
    max_seqs=st.integers(1, 4),
    data=st.data(),
)
def test_an_engine_that_has_capacity_lets_no_request_wait_for_another(lengths, max_seqs, data):
    scheduler = Scheduler(BlockManager(64, SIZE), max_seqs=max_seqs, max_batch_tokens=64)
    todo = [sequence(f"r{i}", priority, length) for i, (priority, length) in enumerate(lengths)]
    ended = []
    for _ in range(200):
        while todo and (not scheduler.unfinished or data.draw(st.booleans())):
            scheduler.add(todo.pop(0))
        waited, before = list(scheduler.waiting), list(scheduler.running)
        step = scheduler.schedule()
        admitted = scheduler.running[len(before) :]
        assert admitted == waited[: len(admitted)], "by priority, then in order of arrival"
        assert len(scheduler.running) == min(max_seqs, len(before) + len(waited)), "none waits while there is capacity"
        ended += scheduler.commit(step, [3] * len(step.sampled), [0.0] * len(step.sampled))
        if not todo and not scheduler.unfinished:
            break
    assert sorted(output.request_id for output in ended) == sorted(f"r{i}" for i in range(len(lengths)))


def test_the_order_of_requests_changes_no_token_or_logprob():
    wanted = requests(count=9, max_tokens=30)
    plain = by_id(generate(engine(batch_invariant=True), wanted))
    probed = [replace(one, priority=int(number % 3 > 0)) for number, one in enumerate(wanted)]
    ended = generate(engine(batch_invariant=True, max_seqs=2), probed)
    assert by_id(ended) == plain
    assert {output.request_id for output in ended[:2]} <= {"r0", "r3", "r6"}, "the first of each group"


def test_probes_run_ahead_of_their_siblings():
    scheduler = Scheduler(BlockManager(64, SIZE), max_seqs=3, max_batch_tokens=64)
    for group in "abc":
        for member in range(3):
            scheduler.add(sequence(f"{group}/{member}", priority=int(member > 0), group=group))
    order = []
    while scheduler.unfinished:
        step = scheduler.schedule()
        order += [seq.request.id for seq in scheduler.running if seq.request.id not in order]
        scheduler.commit(step, [3] * len(step.sampled), [0.0] * len(step.sampled))
    assert order == ["a/0", "b/0", "c/0", "a/1", "a/2", "b/1", "b/2", "c/1", "c/2"]
