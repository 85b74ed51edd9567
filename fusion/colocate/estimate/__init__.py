"""A model on a cluster, on paper: memory, traffic and seconds from shapes alone, for hundreds of dies in seconds.

    recipes/shapes/*.yaml ──► shape     Shape: tensors of a layer and how each may be cut (models we cannot train, too)
    recipes/conf/cluster  ──► hardware  (fusion.colocate.hardware) links, HBM, host, each figure with its source
                     layouts  tp8pp8ep32 ◄─► Parallel
                     setup    Setup: all of it together
      memory   bytes of every owner by phase        traffic  bytes of every die by link, exact, by the plan's rules
      seconds  of a switch by part, and its limit   work     of training and generation, to rank with
      roofline one step of a die: decode, prefill, training, update
      search   layouts, deployments and splits, ranked by the seconds of a step
      report   tables and JSON                      ask      the command line of scripts/plan.py

Pure: no device, no process group, nothing of a checkpoint but its shape.
"""

from fusion.colocate.estimate.layouts import layout_text, parse_layout
from fusion.colocate.estimate.memory import Memory, memory
from fusion.colocate.estimate.search import Estimate, Ranking, estimate, rank
from fusion.colocate.estimate.seconds import Switch, published, to_infer, to_train
from fusion.colocate.estimate.setup import Setup, Workload
from fusion.colocate.estimate.shape import Shape, boxes
from fusion.colocate.estimate.traffic import Side, Traffic, traffic

__all__ = [
    "Estimate",
    "Memory",
    "Ranking",
    "Setup",
    "Shape",
    "Side",
    "Switch",
    "Traffic",
    "Workload",
    "boxes",
    "estimate",
    "layout_text",
    "memory",
    "parse_layout",
    "published",
    "rank",
    "to_infer",
    "to_train",
    "traffic",
]
