"""The choices of `RequestBuffer.dispatch`, written plainly: every choice looks at all requests."""


def plain_dispatch(buffer, engines, room=None, last_engine=None, order=None):
    """Returns the engine of each waiting request that `dispatch` would assign; changes nothing. ``last_engine``: where
    the last request of each group went, where requests are bounded; ``order``: key by which requests are sorted."""
    waiting, running = sorted(buffer.of("waiting"), key=order or _age), buffer.of("running")
    load = {engine: sum(_load(entry) for entry in running if entry.engine == engine) for engine in engines}
    if room is None:
        return _assign_all(waiting, load)
    held = {engine: [entry for entry in running if entry.engine == engine] for engine in engines}
    return _fill(waiting, held, room, last_engine or {})


def _fill(waiting, held, room, last_engine):
    chosen, sibling, reserved = {}, dict(last_engine), {}
    for entry in waiting:
        reserved[entry.id] = tokens = _load(entry) + _chunk(entry, room)
        vacant = [engine for engine, entries in held.items() if len(entries) < room.requests]
        fits = [engine for engine in vacant if not held[engine] or tokens <= _free(held[engine], reserved, room)]
        if not vacant:
            break
        widest = min(vacant, key=lambda engine: (-_free(held[engine], reserved, room), len(held[engine])))
        wish = entry.kv[0] if entry.kv else sibling.get(entry.group, widest)
        engine = wish if wish in fits else widest
        if engine not in fits:
            break
        chosen[entry.id] = sibling[entry.group] = engine
        held[engine] = [*held[engine], entry]
    return chosen


def _free(held, reserved, room):
    if room.kv_tokens is None:
        return float("inf")
    return room.kv_tokens - sum(reserved.get(entry.id, entry.reserved) for entry in held)


def _chunk(entry, room):
    left = entry.max_tokens - entry.generated
    return min(left, room.chunk_tokens) if room.chunk_tokens else left


def _age(entry):
    return entry.position


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
