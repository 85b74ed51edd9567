"""The questions that `StalenessLedger` answers, written plainly: each answer looks at all groups."""

from collections import Counter


def plain_ready(ledger):
    """Finished groups that may be trained in this version, tried one by one."""
    chosen, left = [], ledger.in_flight | ledger.finished
    places = ledger.groups_per_step - ledger.trained_now
    for group in sorted(ledger.finished, key=lambda group: (ledger.finished[group], group)):
        others = [admitted for other, admitted in left.items() if other != group]
        if len(chosen) < places and _in_time(ledger, others, ledger.version, places - len(chosen) - 1):
            chosen.append(group)
            del left[group]
    return chosen


def plain_enough(ledger):
    """The smallest step that may begin now."""
    ready, held, left = plain_ready(ledger), 0, ledger.in_flight | ledger.finished
    if ledger.tokens_per_step is not None:
        for count, group in enumerate(ready, start=1):
            held += ledger.tokens[group]
            del left[group]
            next_places = ledger.groups_per_step
            if held >= ledger.tokens_per_step and _in_time(ledger, left.values(), ledger.version + 1, next_places):
                return ready[:count]
    return ready if len(ready) >= ledger.groups_per_step - ledger.trained_now else []


def plain_may_advance(ledger):
    """Whether all that is untrained could be trained in time from the next version on."""
    untrained = ledger.in_flight | ledger.finished
    return _in_time(ledger, untrained.values(), ledger.version + 1, ledger.groups_per_step)


def _in_time(ledger, admitted, version, places):
    ages, older = Counter(version - start for start in admitted), 0
    for age in range(max(ages, default=0), -1, -1):
        older += ages[age]
        if age > ledger.max_staleness and older:
            return False
        if older > places + (ledger.max_staleness - age) * ledger.groups_per_step:
            return False
    return True
