"""Each wait of the room, taken away, is a failing test on a card whose streams are late."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import ModuleType

import pytest

from fusion.offload import offload, states
from tests.offload import test_offload, test_states

MUTANTS = {
    "out: behind the current stream": (
        offload,
        "self._stream_out.wait_stream(self._device.current_stream())",
        test_offload.test_copies_out_wait_for_uploads_that_the_current_stream_has_queued,
    ),
    "out: behind the copy in": (
        offload,
        "self._stream_out.wait_event(self._returning[trip.key].copied)",
        lambda device: test_offload.test_out_again_without_a_wait_keeps_every_bit(device, True),
    ),
    "back: behind the current stream": (
        offload,
        "self._stream_back.wait_stream(self._device.current_stream())",
        test_offload.test_memory_to_come_back_may_still_be_in_use_by_the_current_stream,
    ),
    "wait: the current stream for copies in": (
        offload,
        "trip.copied.wait(self._device.current_stream())\n        for",
        test_offload.test_copies_start_behind_the_work_that_was_queued_before_them,
    ),
    "wait: the host for copies out": (
        offload,
        "trip.copied.synchronize()\n                self._arrived",
        test_offload.test_memory_is_freed_piece_by_piece_as_copies_are_done,
    ),
    "settle: the host for copies in": (
        offload,
        "trip.copied.synchronize()\n        self.pool",
        test_offload.test_host_regions_are_reused_only_after_they_were_read,
    ),
    "loop: behind the current stream": (
        states,
        "self._fetching.wait_stream(current)",
        test_states.test_slots_take_memory_that_the_current_stream_may_still_use,
    ),
    "loop: the group is there": (
        states,
        "slot.fetched.wait(current)",
        test_states.test_what_is_written_to_the_host_is_what_the_next_step_sees,
    ),
    "loop: its copies end before its slots": (
        states,
        "current.wait_stream(stream)",
        lambda device: test_states.test_three_steps_equal_those_of_states_that_stay(device, 5),
    ),
    "fetch: the slot is vacant": (
        states,
        "stream.wait_event(self._vacant[name])",
        test_states.test_a_step_that_fails_keeps_the_groups_it_had_not_reached,
    ),
    "store: the body is done": (
        states,
        "stream.wait_event(self._left)",
        test_states.test_the_host_may_look_while_a_loop_runs,
    ),
    "tensors: stored": (
        states,
        "self._storing.synchronize()",
        test_states.test_uploads_that_the_body_queues_are_stored,
    ),
    "tensors: fetched": (
        states,
        "self._fetching.synchronize()",
        test_states.test_the_host_may_look_while_a_loop_runs,
    ),
}


def without(module: ModuleType, wait: str) -> ModuleType:
    """The module with the call that ``wait`` begins with replaced by nothing."""
    source = inspect.getsource(module)
    assert source.count(wait) == 1, f"{source.count(wait)} times in {module.__name__}: {wait}"
    call, newline, rest = wait.partition("\n")
    spec = importlib.util.spec_from_loader(f"{module.__name__}_mutant", loader=None)
    assert spec is not None
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[mutant.__name__] = mutant  # where dataclasses look for it
    exec(compile(source.replace(wait, f"pass{newline}{rest}"), spec.name, "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_a_failing_test(late_device, monkeypatch, name):
    module, wait, check = MUTANTS[name]
    check(late_device)
    mutant = without(module, wait)
    if module is offload:
        monkeypatch.setattr(test_offload, "Offloader", mutant.Offloader)
    else:
        monkeypatch.setattr(test_states, "StreamedStates", mutant.StreamedStates)
    with pytest.raises(AssertionError):
        check(late_device)
    late_device.synchronize()
