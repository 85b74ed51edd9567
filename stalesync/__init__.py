"""The controller of the whole system.

config       Config: every room's dataclass, composed; the checks that span rooms; `overrides` as Hydra sees it
prompts      where prompts come from: generators, JSONL, Parquet; seeded, resumable
staleness    which groups may be admitted and which may be trained: the bound as a state machine; pure
admission    every decision of the loop, as `commands`: admit, dispatch, suspend, publish, score, train; pure
controller   the loop, which obeys them at any staleness, in any deployment; `training_run` all around it
generation   the engines as the controller drives them
groups       the groups under way: trained, filtered, failed
step_metrics accumulates one step's metrics; `sample_metrics` of its samples; `evaluation` of held-out prompts
samples      a sample as the controller knows it: no tokens
scoring      from finished samples to rewards, which come from `reward_sources`: a rule, or the reward model
update       from scored groups to an optimizer step: advantages, reference, minibatches
savepoint    the files of a checkpoint beside weights and optimizer
saving       writes a checkpoint while the run continues
pacing       whether a run of modelled cards kept its pace
control      changes how engines generate during a run
card         one worker as a Ray actor; `cards` all of them, called by typed methods; `placing` their ranks
failures     what ends a run
launch       from a config to a finished run and its report
base_model   a small base model to start from, by supervised warm-up with the same trainer
"""
