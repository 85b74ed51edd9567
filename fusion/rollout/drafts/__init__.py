"""Draft what a response probably continues with, from other responses to the same prompt.

    suffix_index   the drafts of one prompt's text: interface, and which implementation this machine has
    native         … in C++ (`suffix_index.cpp`), compiled on first use
    plain          … in Python, where there is no compiler

The engine samples every token with its own noise, as without drafts, and follows a draft as long as it agrees: the same
tokens with rollout.batch_invariant, else up to the rounding of another batch.
"""
