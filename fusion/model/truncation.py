"""The sets of tokens that truncated sampling (top-k, top-p, min-p) leaves: recorded by an engine with every token, and
the support of the distribution that a trainer renormalises over."""

MAX_KEPT_IDS = 1024
"""Maximum number of ids that a truncated distribution keeps: of more, the most likely ones"""
