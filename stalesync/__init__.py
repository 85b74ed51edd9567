"""The controller of a run: the training loop and its staleness bound. Each floor imports only floors above it.

policy/      decides: the staleness bound, admission, dispatch, lending; pure
process/     holds the processes of a run together: Ray, signals, logs, hosts, failures
prompts/     sources of prompts: generators, JSONL, Parquet; seeded, resumable
job/         defines a job: its config, its checkpoint, what a resume does with changed settings
cards/       workers as Ray actors, and the calls of their stages
scoring/     scores finished samples while others are generated
evaluation/  evaluates prompts that are not trained: when, estimates, the best checkpoint
loop/        runs the training loop, at any staleness, in any deployment
simulator/   executes the same decisions in virtual time, for clusters of any size
smoke/       checks the cards of a machine stage by stage, and writes a report to send back

launch       launches a run from its config; `command_line`: for scripts; `console`: the command `rlfusion`
check        checks a job before it starts; `planning`: the command line of scripts/plan.py
standalone   evaluates a checkpoint or a model alone
"""
