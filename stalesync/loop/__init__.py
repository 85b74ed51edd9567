"""Run the training loop: one loop for all deployments and every staleness.

controller       the loop: executes the commands of `policy`; `training_run`: a whole run around it
generation       controls the engines; `engines`: publishes to them, and replaces those that died
groups           tracks groups in progress until each is trained, filtered or failed
update           one optimizer step on scored groups: advantages, reference, minibatches
step             closes a step and writes its row; `step_metrics`: accumulates it; `sample_columns`: its samples
checkpoints      write a checkpoint while the run continues
"""
