#!/usr/bin/env bash
#SBATCH --job-name=rlfusion
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append
# Trains on the nodes of a Slurm job: Ray's head on the first node, one task per node, the run on the first node.
#   sbatch --nodes=4 recipes/slurm.sh run.name=NAME model.path=FOLDER data.source=FILE cluster.npus=32 [overrides]
# Submit it in the checkout, which all nodes see at the same path, as run.dir and model.path; options of sbatch, such as
# --gres, --partition or --time, replace those above. Two minutes before the time limit, and at scancel --signal=TERM
# --batch, the run ends its step, saves a checkpoint, and Ray stops: --signal=B:TERM@600 leaves ten minutes for long
# steps. The same command goes on from the newest checkpoint: one is also written every ten minutes unless run.save_every
# says otherwise. A token in a file that only its user can read protects Ray, whose own files are in a folder of each node
# that only its user may enter.
set -euo pipefail
fail() { echo "error: $*" >&2; exit 2; }
[ -n "${SLURM_JOB_ID:-}" ] || fail "not a Slurm job: sbatch recipes/slurm.sh run.name=NAME model.path=FOLDER …"
[[ " $* " == *" model.path="* ]] || fail "model.path=FOLDER is missing"
[[ " $*" =~ " "(data|data\.source)= ]] || fail "data.source=FILE is missing"
[[ " $* " == *" run.name="* ]] || fail "run.name=NAME is missing: the same command is to go on with the same run"
cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this script
[ -f scripts/environment.sh ] || fail "$PWD is not the checkout: submit the job there"
source scripts/environment.sh

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} port=$((20000 + SLURM_JOB_ID % 10000)) count=${#nodes[@]}
[ "$count" -eq "${SLURM_NTASKS:-$count}" ] || fail "$SLURM_NTASKS tasks on $count nodes: expected --ntasks-per-node=1"

ray_pids=() run_pid='' stopped=''
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"
export MALLOC_ARENA_MAX=2 RAY_task_events_report_interval_ms=0 # bound the memory of Ray's processes (docs/stalesync.md)
# Ray lets all users write to its temporary folder: it is in one that mkdir creates, with a name that nobody can know before.
RAY_TMPDIR=/tmp/ray-$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_TMPDIR
on_every_node() { srun --overlap --nodes="$count" --ntasks="$count" --ntasks-per-node=1 "$@"; }
# shellcheck disable=SC2329 # a trap calls it
finish() { # Ray runs in the foreground of its tasks: it stops with them
  trap '' TERM
  for pid in "${ray_pids[@]}"; do kill -TERM "$pid" 2> /dev/null || true; done
  wait || true
  rm -f "$RAY_AUTH_TOKEN_PATH"
  on_every_node rm -rf "$RAY_TMPDIR" || true
}
trap finish EXIT
# The run ends in order; srun passes the signal on to it. Before it has started, the script ends.
trap 'stopped=1; if [ -n "$run_pid" ]; then kill -TERM "$run_pid" 2> /dev/null || true; else exit 143; fi' TERM
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")

# NODE COMMAND...: replaces a subshell, so that a signal to the job in the background reaches srun, which passes it on.
on() { local node=$1; shift; exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@"; }
# The address of the head is what another node knows it by: its own /etc/hosts may map its name to 127.0.1.1.
address=127.0.0.1
if [ "$count" -gt 1 ]; then
  address=$(on "${nodes[1]}" getent ahostsv4 "$head" | awk '/STREAM/ {print $1; exit}')
  [ -n "$address" ] || fail "${nodes[1]} finds no address of $head"
fi
on_every_node mkdir -m 700 "$RAY_TMPDIR" || fail "cannot create $RAY_TMPDIR on every node"
# Ray starts workers at niceness 15; on a busy core they get about 3 % of the CPU time.
on "$head" ray start --disable-usage-stats --block --head --node-ip-address="$address" --port="$port" \
  --system-config='{"worker_niceness": 0}' & ray_pids+=($!)
for node in "${nodes[@]:1}"; do
  on "$node" ray start --disable-usage-stats --block --address="$address:$port" & ray_pids+=($!)
done

on "$head" python - "$address:$port" "$count" << 'PYTHON' & run_pid=$!
import sys, time
import ray
address, count = sys.argv[1], int(sys.argv[2])
end = time.monotonic() + 300
while True:
    try:
        ray.init(address=address, log_to_driver=False)
        found = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except ConnectionError:
        found = 0
    if found >= count:
        break
    if time.monotonic() > end:
        sys.exit(f"error: Ray runs on {found} of {count} nodes after 300 s; see the output of ray start above")
    time.sleep(2)
PYTHON
status=0
wait "$run_pid" || status=$?
run_pid=''
[ -z "$stopped" ] || exit 143
[ "$status" -eq 0 ] || exit "$status"

on "$head" env RAY_ADDRESS="$address:$port" python scripts/train.py cluster.address=auto run.resume=auto \
  run.save_every=10min "$@" & run_pid=$!
wait "$run_pid" || status=$?
# A signal ends the first wait, not the run.
while kill -0 "$run_pid" 2> /dev/null; do status=0; wait "$run_pid" || status=$?; done
exit "$status"
