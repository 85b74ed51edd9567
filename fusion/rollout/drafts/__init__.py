"""Draft what a response probably continues with, from other responses to the same prompt.

    suffix_index   the drafts of one prompt's text, in C++ (`suffix_index.cpp`), compiled on first use
    drafter        drafts for the sequences of an engine
    texts          what the engine generates, and others, by prompt; indexed where drafts are looked up
    prompt         the text of one prompt
    rewards        how much an earlier response counts, by its reward
    budget         how many drafted tokens a step verifies, by how often others were right
    text_store     what all engines of a run have generated, by prompt
    text_client    what an engine sends to the store, and asks for
    exchange       sends it beside the steps, and takes over the replies
    history_files  the history of prompts in a checkpoint
    pieces         the form of these messages

The engine samples every token with its own noise, as without drafts, and follows a draft as long as it agrees: the same
tokens with rollout.engine.batch_invariant, else up to the rounding of another batch."""
