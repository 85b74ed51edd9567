"""Decide: observations and plain data in, commands as plain data out. Imports neither ray nor torch nor a clock.

admission      all decisions of the loop, as `commands`: admit, dispatch, suspend, publish, score, train;
               `admission_spec`: the settings that they depend on
staleness      which groups may be admitted and which may be trained: the bound, as a state machine
supply         how many groups are admitted, and how many requests each engine receives
lending        when cards that train leave generation before a step has its groups
engine_deaths  whether the death of a card can be mended; `placing`: ranks to actors; `patience`: when a late call is
               reported and given up; `pacing`: whether a paced run kept its pace
save_interval  when a checkpoint is due; `reward_history`: rewards of a row's last responses

A run obeys them in `loop`, the simulator in virtual time, property tests in neither."""
