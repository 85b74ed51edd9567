"""Plan a model on a cluster from shapes alone: memory, traffic, seconds, layouts; recommend deployment and staleness.

    python scripts/plan.py model=pangu_718b cluster=cloudmatrix384 data.prompts_per_step=512 algorithm.group_size=16
    python scripts/plan.py model=deepseek_r1_671b cluster=a3_128 train=tp4pp8ep32 infer=tp2ep128 --json -
    python scripts/plan.py model=qwen3_30b_a3b cluster.hardware=h100 cluster.npus=16

    model=     a shape in recipes/shapes, or a Hugging Face folder, as model.path=
    cluster=   a file of recipes/conf/cluster that names its hardware
    cluster.hardware= cluster.npus=
               a card of fusion/costmodel/hardware (ascend_910b, ascend_910c, h100, h800) and the number of its dies;
               they override those of cluster=, or replace it
    train=     layout of training, such as tp8pp8ep32 (the remaining factor is data parallel); auto: the best one
    infer=     layout of generation, likewise
    KEY=VALUE, GROUP=CHOICE
               the job, as for scripts/train.py: the samples and lengths of a step come from data.prompts_per_step,
               algorithm.group_size, data.max_prompt_length and rollout.max_response_length, and are printed. Keys that
               a plan needs are read, keys without an effect on it accepted, all others refused. Defaults are those of
               scripts/train.py, but model=bfloat16 and training.recompute=true
    --job      lists keys that would be refused instead
    --json PATH   everything as JSON; - prints it instead of the tables

Exits with 1 if the given layouts do not fit. Needs no device and no checkpoint.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # needs no installation

from fusion.resources import plan_command  # noqa: E402

USAGE = """usage: python scripts/plan.py [--help] model=NAME cluster=NAME [train=LAYOUT] [infer=LAYOUT] [KEY=VALUE ...]
                              [--job] [--json PATH]"""

if __name__ == "__main__":
    sys.exit(plan_command(USAGE, __doc__, "stalesync.planning"))
