"""Simulate runs of any size in virtual time: the run's own decisions, with costs of `fusion/costmodel`.

    Config ─ setup ─► run ── commands of the real Admission, ledger, buffer ──► cards ─┬─► engine ─► rank ─► decoding
              │        ▲                                                       │        │     └─ jump
       lengths┘        └──────────── observe_…, in virtual time (clock) ◄──────┘        └─► switches, training

    clock      heap of events: virtual time                  lengths    drawn, or of a trace
    sequence   an engine's requests, plain data              rank       one attention rank's requests
    engine     ranks that step together                      jump       seconds of many steps in closed form
    decoding   sequences and KV blocks that grow, in O(1)    outbox     collects finished samples
    drafts     tokens a step, in expectation                 draft_texts   … measured on recorded texts
    cards      switches, engines, training, scoring          run        executes the commands of a run's Admission
    setup      the same specs and costs as a paced run       slow_dies  which dies are slow, by how much
    work       what a run did, and its least time            outcome    its figures
    cluster    the same work on more supernodes              report, plot, command_line   of scripts/simulate.py
    baseline   the published baseline, term by term          choice     deployment, split and bound for a job

Pure: neither torch nor Ray. docs/simulator.md states what is modelled and what is not."""
