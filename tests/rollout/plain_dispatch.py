"""The choices of `RequestBuffer.dispatch`, written plainly: every choice looks at all requests."""


def plain_dispatch(buffer, engines, max_requests=None, last_engine=None):
    """Returns the engine of each waiting request that `dispatch` would assign; changes nothing. ``last_engine``: where
    the last request of each group went, where requests are bounded."""
    waiting, running = buffer.of("waiting"), buffer.of("running")
    count = {engine: sum(entry.engine == engine for entry in running) for engine in engines}
    load = {engine: sum(_load(entry) for entry in running if entry.engine == engine) for engine in engines}
    if max_requests is not None:
        return _fill(waiting, {engine: max_requests - count[engine] for engine in engines}, last_engine or {})
    return _assign_all(waiting, load)


def _fill(waiting, room, last_engine):
    chosen, sibling = {}, dict(last_engine)
    for entry in waiting:
        widest = max(room, key=lambda engine: room[engine])
        if room[widest] <= 0:
            break
        wish = entry.kv[0] if entry.kv else sibling.get(entry.group, widest)
        engine = wish if room.get(wish, 0) > 0 else widest
        chosen[entry.id] = sibling[entry.group] = engine
        room[engine] -= 1
    return chosen


def _assign_all(waiting, load):
    total, chosen = sum(load.values()) + sum(map(_load, waiting)), {}
    for entry in waiting:
        home = entry.kv[0] if entry.kv else None
        if home in load and load[home] * len(load) < total:
            chosen[entry.id] = home
            load[home] += _load(entry)
    groups = {}
    for entry in waiting:
        if entry.id not in chosen:
            groups.setdefault(entry.group, []).append(entry)
    for members in sorted(groups.values(), key=lambda members: -sum(map(_load, members))):
        engine = min(load, key=lambda engine: load[engine])
        chosen |= {entry.id: engine for entry in members}
        load[engine] += sum(map(_load, members))
    return {entry.id: chosen[entry.id] for entry in waiting}


def _load(entry):
    return entry.prompt_tokens + entry.generated
