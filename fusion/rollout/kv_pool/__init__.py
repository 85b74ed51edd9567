"""The KV pool of each machine: KV of requests that left an engine, for any engine to continue them.

    pool      which KV of a rank is in memory, on disk, or evicted: limits, least recently parked first   (pure)
    header    the format of a file, and its one reader, which verifies it
    folder    one rank's part of a folder: owner, readers and end of a file, also when a rank dies
    files     parks and finds the KV of one rank in these folders
    pull      which KV is pulled from other machines, and how long an engine waits for it                        (pure)
    remote    serves the files of a machine, and fetches those of others

    rank of engine A ─ park ─► /dev/shm/…/NAME ─ find, verified, read into pinned memory ─► rank of engine B
                                   │ limit
                                   └──► rollout.kv_pool.spill             ranks of other machines: `remote`, by a `Peer`

A machine's own ranks need no process: a name is a digest of run, host, request, policy version, tokens and shard, so
every rank finds what it may use, and nothing else. The engine's side: `fusion.inference.pooled`, `pooled_prompts`."""
