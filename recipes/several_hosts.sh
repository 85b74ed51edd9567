#!/usr/bin/env bash
# Trains on several hosts: starts Ray on them through ssh, runs the job on the first one, and stops Ray.
#   bash recipes/several_hosts.sh [--dry-run] [PLAN] (--hosts FILE | HOST...) -- model.path=FOLDER data.source=FILE [overrides]
# FILE has one host per line; the first host is the head. Every host must accept ssh without a password, and have this
# checkout at the same path, with its packages installed in the active environment or in .venv. All hosts share the file
# system of run.dir and see model.path at the same path; docs/stalesync.md, "Several hosts", says what is checked.
# PLAN is model=SHAPE cluster=NAME [train=LAYOUT] [infer=LAYOUT] as for scripts/plan.py: the job runs on Ascend cards in
# the layouts that it recommends for them and the overrides, and it must fit in memory. Without it the overrides state cards and layouts
# (cluster.npus=16 …). A token that only the processes of this launch have protects Ray.
# --dry-run prints every command instead of running it; with a PLAN it needs no hosts and uses placeholder names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "error: $*" >&2; exit 2; }

dry= hosts=() plan=() overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h|--help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    --dry-run) dry=1 ;;
    --hosts)
      [ $# -ge 2 ] || fail "--hosts needs a file with one host per line"
      [ -r "$2" ] || fail "--hosts $2: no such file"
      mapfile -t -O "${#hosts[@]}" hosts < <(sed 's/#.*//' "$2" | awk 'NF {print $1}')
      shift ;;
    --) shift; overrides=("$@"); break ;;
    model=*|cluster=*|train=*|infer=*) plan+=("$1") ;;
    *=*) fail "$1: overrides of the config come after --" ;;
    -*) fail "unknown option $1: expected --dry-run, --hosts FILE or hosts" ;;
    *) hosts+=("$1") ;;
  esac
  shift
done
for host in "${hosts[@]}"; do # ssh would take a name that begins with - for an option
  [[ $host =~ ^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.:-]*$ ]] ||
    fail "host $(printf %q "$host"): expected a name or an address, with or without USER@"
done
source scripts/environment.sh

resources=() planned=()
if [ ${#plan[@]} -gt 0 ]; then
  answer=$(mktemp) && trap 'rm -f "$answer"' EXIT
  bucket="fusion.bucket_bytes=$((512 << 20))" # large enough for an expert's matrices (63 MB and 31 MB) in an eighth of it
  job=() # the model of the plan is model=SHAPE
  for word in "${overrides[@]}"; do case "$word" in -*|model.path=*|hydra*) ;; *) job+=("$word") ;; esac; done
  python scripts/plan.py "${plan[@]}" "$bucket" "${job[@]}" --job --json "$answer" || status=$?
  [ -s "$answer" ] || exit "${status:-1}"
  [ -z "${status:-}" ] || fail "the plan does not fit in memory; choose other layouts with train= and infer="
  read -r nodes dies train infer < <(python - "$answer" <<'PYTHON'
import json, re, sys
plan = json.load(open(sys.argv[1]))
def layout(name):
    sizes = re.findall(r"(etp|tp|pp|ep|dcp|cp)(\d+)", plan["layouts"][name])
    return ",".join(f"parallel.{name}.{axis}={size}" for axis, size in sizes)
print("plan:", *plan["notes"], sep="\n  ", file=sys.stderr)
print(plan["nodes"], plan["dies_per_node"], layout("train"), layout("infer"))
PYTHON
  )
  if [ ${#hosts[@]} -eq 0 ] && [ -n "$dry" ]; then mapfile -t hosts < <(seq -f "node%02g" "$nodes"); fi
  [ ${#hosts[@]} -eq "$nodes" ] || fail "${#hosts[@]} hosts: the plan needs $nodes with $dies dies each (--hosts FILE, or their names)"
  cluster=() && for word in "${plan[@]}"; do [[ $word != cluster=* ]] || cluster=("$word"); done
  planned=("${cluster[@]}" device=npu model=bfloat16 "$bucket" ${train//,/ } ${infer//,/ } training.recompute=true)
  resources=(--resources="{\"NPU\": $dies}")
fi
[ ${#hosts[@]} -gt 0 ] || fail "no hosts: expected --hosts FILE, or their names"
repeated=$(printf '%s\n' "${hosts[@]}" | sort | uniq -d | paste -sd ' ')
[ -z "$repeated" ] || fail "hosts named twice: $repeated"
[ -n "$dry" ] || [[ " ${overrides[*]-}" == *" model.path="* ]] || fail "model.path=FOLDER is missing (after --)"
[ -n "$dry" ] || [[ " ${overrides[*]-}" =~ " "(data|data\.source)= ]] || fail "data.source=FILE is missing (after --)"

job=(python scripts/train.py "${planned[@]}" cluster.address=auto "${overrides[@]}")
"${job[@]}" --cfg job > /dev/null   # checks every key before any host is contacted

port=6379 head=${hosts[0]} others=("${hosts[@]:1}")
# Ray's calls carry this token: without one, everyone who reaches its ports can run code on all hosts. It is sent to ssh
# on its standard input, as every user of a machine can read the arguments of a process; the environment of a process,
# where it then is, only the process's own user can read.
token=RANDOM
[ -n "$dry" ] || token=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
# Ray lets all users write to its temporary folder, and follows links in it, so it is in a folder that only this user may
# enter: mkdir fails where another user has taken its name, which nobody can know before.
ray_folder=/tmp/ray-RANDOM
[ -n "$dry" ] || ray_folder=/tmp/ray-$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' \n')
on() { # HOST COMMAND...: run the command on HOST with bash, whatever the login shell, in this checkout and its environment
  local host=$1 line; shift
  line="cd $(printf %q "$PWD") && export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$token MALLOC_ARENA_MAX=2 RAY_task_events_report_interval_ms=0 RAY_TMPDIR=$ray_folder && source scripts/environment.sh && $(printf '%q ' "$@")"
  line=${line% }
  if [ -n "$dry" ]; then echo "ssh -o BatchMode=yes $host bash <<< ${line@Q}"; else ssh -o BatchMode=yes "$host" bash <<< "$line"; fi
}
on_all() { # COMMAND... -- HOST...: run the command on all hosts at once; name the hosts on which it failed
  local command=() started=() failed=() host
  while [ "$1" != -- ]; do command+=("$1"); shift; done
  shift
  for host in "$@"; do
    if [ -n "$dry" ]; then on "$host" "${command[@]}"; else on "$host" "${command[@]}" & started+=("$!:$host"); fi
  done
  for host in "${started[@]}"; do wait "${host%%:*}" || failed+=("${host#*:}"); done
  [ ${#failed[@]} -eq 0 ] || fail "${command[*]:0:2} failed on ${failed[*]}"
}
ray_start=(ray start --disable-usage-stats "${resources[@]}")

# The address of the head is what another host knows it by: its own /etc/hosts may map its name to 127.0.1.1.
address=${head##*@} known=()
if [ ${#others[@]} -gt 0 ]; then
  look_up=(getent ahostsv4 "$address")
  if [ -n "$dry" ]; then
    on "${others[0]}" "${look_up[@]}"
  else
    found=$(on "${others[0]}" "${look_up[@]}" | awk '/STREAM/ {print $1; exit}') || true
    [ -n "$found" ] || fail "${others[0]} finds no address of $address"
    address=$found known=(--node-ip-address="$found")
  fi
fi

[ -n "$dry" ] || trap 'rm -f "${answer:-}"; (on_all ray stop -- "${hosts[@]}") || true; on_all rm -rf "$ray_folder" -- "${hosts[@]}"' EXIT
on_all mkdir -m 700 "$ray_folder" -- "${hosts[@]}"
# Ray starts workers at niceness 15; on a busy core they get about 3 % of the CPU time.
on "$head" "${ray_start[@]}" "${known[@]}" --head --port="$port" --system-config='{"worker_niceness": 0}'
[ ${#others[@]} -eq 0 ] || on_all "${ray_start[@]}" --address="$address:$port" -- "${others[@]}"
on "$head" "${job[@]}"
if [ -n "$dry" ]; then
  on_all ray stop -- "${hosts[@]}"
  on_all rm -rf "$ray_folder" -- "${hosts[@]}"
  echo "dry run: ${#hosts[@]} hosts${plan:+, $((nodes * dies)) dies; the plan fits}"
fi
