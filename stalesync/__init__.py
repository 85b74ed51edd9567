"""The controller of the whole system.

config       Config: every room's dataclass, composed; the checks that span rooms; `overrides` as Hydra sees it
prompts      where prompts come from: generators, JSONL, Parquet; seeded, resumable
staleness    which groups may start and which may be trained: the bound as a state machine
controller   the loop: prompts → generate → reward → update, at any staleness, in any deployment
collecting   from prompts to the groups of a step: weights to the engines, requests in, samples out
generation   the engines: which requests run where, suspended and resumed
groups       what becomes of groups under way: trained, filtered, failed
record       what the stages of a step tell; `figures` of its samples
samples      a sample as the controller knows it: no tokens
scoring      from finished samples to rewards, which come from `reward_sources`: a rule, or the reward model
update       from scored groups to an optimizer step: advantages, reference, minibatches
savepoint    what of a run a checkpoint holds beside weights and optimizer
saving       a checkpoint is written while the run goes on
pacing       whether a run of modelled cards kept its pace
control      a run is told to generate otherwise while it goes on
card         one worker as a Ray actor; `cards` all of them, called by typed methods; `placing` their ranks
failures     what ends a run
launch       from a config to a finished run and its report
base_model   a small base model to start from, by supervised warm-up with the same trainer
"""
