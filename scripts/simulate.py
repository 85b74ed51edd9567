r"""Simulate training runs on clusters of any size: the run's own decisions in virtual time, costs of the cost model.

    python scripts/simulate.py model=pangu_718b cluster=cloudmatrix384 supernodes=1,4,16 stalesync.max_staleness=0,1,2 \
        data.prompts_per_step=512 data.max_prompt_length=1024 rollout.max_response_length=16384 \
        rollout.engine.max_seqs=64
    python scripts/simulate.py model=qwen3_30b_a3b cluster.hardware=h100 cluster.npus=16 fusion=colocated,hybrid
    python scripts/simulate.py model=olmoe_7b cluster.hardware=ascend_910c cluster.npus=8 trace=runs/NAME/groups.jsonl

    model=     a shape in recipes/shapes, or a Hugging Face folder
    cluster=   a file of recipes/conf/cluster that names its hardware: one supernode, or one cluster
    cluster.hardware= cluster.npus=
               a card of fusion/costmodel/hardware and the number of its dies; they override those of cluster=
    supernodes= stalesync.max_staleness= fusion=
               each one or several values, such as 1,4,16: every combination is simulated. The prompts of a step and
               fusion.infer_cards are those of one supernode
    train= infer=
               layouts of one supernode, such as tp8pp8ep32; auto: the best one for the deployment
    rollout.sampling.forced_median= rollout.sampling.forced_spread=[0.89,0.43,0.01] data.rows=
               lengths of responses: their median (null: an eighth of rollout.max_response_length); the standard
               deviations of their logarithm between rows and within a group, and the share that reaches the maximum;
               rows after which they come again
    trace=     JSON Lines with group and response_tokens, as a run's groups.jsonl: these lengths instead
    turns=4 observation_tokens=64 latency_s=2.5 latency_spread=0.5 branch_share=0.3
               conversations: each length is sampled in so many turns, between which an environment answers with so
               many tokens, after seconds of this median and standard deviation of the logarithm; behind this share of
               the turns a branch begins
    rollout.drafts.source=both texts=runs/NAME/samples.jsonl tokenizer=FOLDER
               drafts, with the published acceptance, or with that of recorded responses, which the engines' drafter
               replays: JSON Lines with prompt and response, or samples. Without a tokenizer.json a BPE is trained
    reward.latency_s=2 reward.workers=16
               rewards by a rule: seconds that each takes (0), and how many processes score at once
    slow_share=0.002 slow_by=0.05,0.3 network_gb_s=2.7 scaling=strong
               of several supernodes: share of slow dies (0), and by which share of the usual seconds, from and to; GB/s
               that a die reaches between supernodes (as in the card's file); strong: all share the prompts of one
               (weak: every supernode brings its own)
    KEY=VALUE, GROUP=CHOICE
               the job, as for scripts/train.py: prompts, groups and lengths of a step, rollout, training, offload.
               Keys that are not modelled (rollout.drafts.tree=) are refused, those without an effect on time are
               accepted.
               Defaults are those of scripts/train.py, but model=bfloat16, training.recompute=true, run.steps=20
    --job      lists keys that would be refused instead
    --json PATH   everything as JSON; - prints it instead of the tables
    --png PATH    a plot of tokens/s over supernodes

Needs no device and no checkpoint. docs/simulator.md states what is modelled and what is not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # needs no installation

from fusion.resources import plan_command  # noqa: E402

USAGE = """usage: python scripts/simulate.py [--help] model=NAME cluster=NAME [supernodes=N,...] [fusion=NAME,...]
                                  [stalesync.max_staleness=N,...] [KEY=VALUE ...] [--json PATH] [--png PATH]"""

if __name__ == "__main__":
    sys.exit(plan_command(USAGE, __doc__, "stalesync.simulator.command_line"))
