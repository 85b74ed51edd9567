"""Score finished samples while others are generated.

samples         a sample in the controller: ids, lengths, versions, text, reward, but no tokens
scoring         from finished samples to rewards; `sources`: a rule in guarded processes, or a reward model on cards;
                `terms`: what is added to a reward
progress        which samples have arrived, wait for their score, or have one; pure
whole_groups    samples held until their group is complete, for rewards that compare siblings; `batch_size`: how many
                are scored at a time; `failed_rewards`: whether too many failed; pure
"""
