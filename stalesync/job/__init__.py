"""Define a job: its config, what it continues, and what can be said of it before a card starts.

config             composes the dataclasses of all packages; `cross_checks`: checks across them; `keys`: all keys, with
                   what is declared of them; `overrides`, `other_names`: the command line's words;
                   `job_arguments`: the same words for plan and simulation
decision_settings  the settings of a config that decisions depend on; `workload`: a step's work, and
                   the memory of a card
savepoint          files of a checkpoint
resume             opens the folder of a run that resumes, and compares what it depends on; `resume_rules`: what it does
                   with changed settings
control            changes how a running run generates
combinations       which trainers and engines can run on a machine; `contract`: what another program's sources lack;
                   `tokenizer_folder`: checks a model's tokenizer
base_model         creates a small base model; `sft`: fine-tunes a model on chats; `conversion`: exports a checkpoint
"""
