"""Run the workers as Ray actors, one per card, and call their stages.

cards          all cards of a run, and their stages; `stage_calls`: one stage on several cards, and its failures
card           one worker as an actor; `actors`: start them by rank, and others in place of those that died
card_failures  the cause of what cards report as failed; notices engines that have died
servers        actors that serve a machine's KV pool to other machines, and text for drafts
"""
