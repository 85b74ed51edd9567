"""A model on a cluster, on paper: memory, traffic and seconds from shapes alone, for hundreds of dies in seconds.

    recipes/shapes/*.yaml ──► shape     Shape: tensors of a layer and how each may be cut (models we cannot train, too)
    recipes/conf/cluster  ──► hardware  links, HBM, host, each figure with its source
                     layouts  tp8pp8ep32 ◄─► Parallel
                     setup    Setup: all of it together
      memory   bytes of every owner by phase        traffic  bytes of every die by link, exact, by the plan's rules
      switch_time  of a switch by part, its limit    step_time  of training and generation, to rank with
      roofline one step of a die: decode, prefill, training, update
      search   layouts, deployments and splits, ranked by the seconds of a step
      report   tables and JSON                      command_line  of scripts/plan.py

Pure: no device, no process group, nothing of a checkpoint but its shape.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
