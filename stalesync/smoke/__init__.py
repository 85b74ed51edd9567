"""Check the cards of one machine stage by stage, from the device alone to a small run, and write a report to send back.

    prerequisites   what the machine lacks (cards, driver, CANN, torch_npu), and the versions of what it has; no torch
    stages          what each stage starts: one process, or one for each card; skips those that cannot run; pure
    processes       runs them with a time limit, and keeps what they wrote
    on_card         device, hccl and switch: what such a process does on its card
    model_checks    model: operators, log-probabilities and repeated steps of a trainer and an engine on a card
    training        ten steps of a small model by `scripts/train.py`, and what its metrics must show
    report          the results of the stages as JSON and as text; pure

A stage is a process of its own, so that a crash or a hang in a driver costs one stage and is reported with it."""
