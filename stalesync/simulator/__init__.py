"""Simulate runs of any size in virtual time: the run's own decisions, with costs of `fusion/costmodel`.

    Config ─ setup ─► run ── commands of the real Admission, ledger, buffer ──► cards ─┬─► engine ─► rank ─► kv_blocks
              │        ▲                                                       │        │     └─ jump
       lengths┘        └──────────── observe_…, in virtual time (clock) ◄──────┘        └─► switches, training
                                                                                overheads: controller and queue

    clock      heap of events: virtual time                  lengths    drawn, or of a trace
    sequence   a request in an engine, plain data            rank       one attention rank's requests
    kv_blocks  blocks of sequences that grow, in O(1)        jump       seconds of many steps in closed form
    engine     ranks that step together; `engine_spec`       outbox     collects finished samples
    decoding   sequences that advance alike, in O(1)         drafts     tokens a step, in expectation
    cards      switches, engines, training; `scoring`        run        executes the commands of a run's Admission
    overheads  measured costs of controller and queue        setup      the same specs and costs as a paced run
    work       the work-conserving bound                     record, outcome   what a run did, and its figures
    cluster    the same work on more supernodes              report, plot, command_line   of scripts/simulate.py
    slow_dies  which dies are slow, by how much              choice     deployment, split and bound for a job
    baseline   the published baseline, term by term          draft_texts   … measured on recorded texts

Pure: neither torch nor Ray. docs/simulator.md states what is modelled and what is not."""
