"""The controller of a run: the training loop and its staleness bound.

config       Config: composes the dataclass of every package, and checks across them; `overrides`: Hydra's schema
prompts      sources of prompts: generators, JSONL, Parquet; seeded, resumable
staleness    which groups may be admitted and which may be trained: the bound as a state machine; pure
admission    all decisions of the loop, as `commands`: admit, dispatch, suspend, publish, score, train; pure;
             `admission_spec`: the settings they depend on; `supply`: how many groups and requests; `tail`: the share of
             samples that are a step's tail; `lending`: when cards that train leave generation before it has its groups
simulator/   executes the same commands in virtual time, for clusters of any size
controller   the loop, which executes the commands, at any staleness, in any deployment; `training_run`: a whole run
generation   controls the engines
groups       tracks the groups in progress: trained, filtered, failed
step_metrics accumulates one step's metrics; `sample_metrics` of its samples
evaluation/  evaluates prompts that are not trained: when, estimates, the best checkpoint; also without a run
samples      a sample in the controller: no tokens
scoring      scores finished samples with one of `reward_sources`: a rule, or the reward model; `reward_terms`: what is
             added to it
update       runs an optimizer step on scored groups: advantages, reference, minibatches
resume       opens the folder of a run that resumes, and finds its checkpoint before anything in it changes
resume_rules what a resume does with every setting that has changed; `run_inputs`: what a checkpoint depends on
savepoint    files of a checkpoint other than weights and optimizer; which one to resume from, which to remove
saving       writes a checkpoint while the run continues; `save_interval`: decides when, pure
conversion   exports a checkpoint to a Hugging Face folder
pacing       checks whether a run of modelled cards kept its pace
control      changes the generation settings during a run
card         one worker as a Ray actor; `card_actors`: starts them; `cards`: calls them (`stage_calls`: typed);
             `placing`: assigns their ranks; `patience`: when a late one is reported and given up, pure;
             `card_failures`: finds the cause of what they report as failed
engine_watch notices engines that have died; `engine_deaths`: which are replaced, pure; `engine_restarts`: replaces them
failures     reports the root cause of a failed run; `run_log`, `process_log`: records it and every process's log
launch       launches a run from its config, and reports at its end; `stopping`: ends it by a signal; `command_line`:
             for scripts; `console`: the command `rlfusion`, which runs them
ray_cluster  starts Ray on loopback with a token, or joins a cluster; `ray_processes`, `ray_guard`: watch and end them;
             `end_order`, `exit_status`: what ended first, and how; `ray_end`: ends a run that waits in Ray
workload     derives the workload of a step from a config, for plan, simulation and run; pure; `job_arguments`: reads
             the arguments of a job for `planning` (scripts/plan.py) and the simulator
base_model   creates a small base model by supervised training with the same trainer
combinations decides which trainers and engines can run on a machine, for `scripts/doctor.py`; pure
smoke/       checks the cards of a machine stage by stage, and writes a report to send back
"""
