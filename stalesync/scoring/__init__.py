"""Score finished samples while others are generated.

samples         a sample in the controller: ids, lengths, versions, text, reward, but no tokens
scoring         from finished samples to rewards; `sources`: a rule in guarded processes, or a reward model on cards
progress        which samples have arrived, wait for their score, or have one; pure
failed_rewards  whether too many failed; pure
"""
