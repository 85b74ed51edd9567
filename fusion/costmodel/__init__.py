"""Estimate memory, traffic and seconds of a model on a cluster, from shapes alone, hundreds of dies in seconds.

    recipes/shapes/*.yaml ──► shape      Shape: ModelConfig, and elements by scope from its parameter table
    hardware/*.yaml ────────► hardware/  Hardware: links, HBM, host of a card, each constant with its source
                     presets  both by name         layouts  tp8pp8ep32 ◄─► Parallel
                     setup    Setup: shape, hardware, two layouts, limits, workload
      memory       bytes by owner and phase        attention    cost of attention by its kind
      segments     who holds what in two layouts   traffic      bytes of every die by link, exact, by the plan's rules
      roofline     one step of a die               step_time    training and generation, for ranking
      launches     the host's floor of a step      rates        tokens/s of a die, beside published ones
      switch_time  a switch by part, its limit     search       layouts and deployments, ranked by step seconds
      fitting      settings with which a job fits
      report       tables of scripts/plan.py       pace         cost of the steps of paced cards

Pure: no process group, no device, no clock. Only a run whose cards are paced loads it, and `cluster.hardware`."""
