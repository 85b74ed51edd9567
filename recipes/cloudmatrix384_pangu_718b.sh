#!/usr/bin/env bash
# Trains Pangu 718B on one CloudMatrix 384 supernode: starts Ray on its hosts, trains in the layouts that
# scripts/plan.py recommends, and stops Ray.
#   bash recipes/cloudmatrix384_pangu_718b.sh [--dry-run] (--hosts FILE | HOST...) -- model.path=FOLDER [overrides]
#   bash recipes/cloudmatrix384_pangu_718b.sh --dry-run
# FILE has one host per line; the first host is the head. All hosts must accept ssh without a password and have this
# checkout at the same path. train=LAYOUT and infer=LAYOUT before the -- choose other layouts.
# --dry-run plans for the 768 dies, resolves hosts and config, and prints every command instead of running it; without
# hosts it uses placeholder names. It fails if the plan does not fit in memory. So far the trainer supports Qwen3 and
# Qwen3-MoE: another architecture can be planned for, but the job reports it as unsupported when it starts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "error: $*" >&2; exit 2; }

dry= hosts=() layouts=() overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h|--help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    --dry-run) dry=1 ;;
    --hosts)
      [ $# -ge 2 ] || fail "--hosts needs a file with one host per line"
      [ -r "$2" ] || fail "--hosts $2: no such file"
      mapfile -t -O "${#hosts[@]}" hosts < <(sed 's/#.*//' "$2" | awk 'NF {print $1}')
      shift ;;
    --) shift; overrides=("$@"); break ;;
    train=*|infer=*) layouts+=("$1") ;;
    *=*) fail "$1: overrides of the config come after --" ;;
    -*) fail "unknown option $1: expected --dry-run, --hosts FILE or hosts" ;;
    *) hosts+=("$1") ;;
  esac
  shift
done
source scripts/environment.sh

plan=$(mktemp) && trap 'rm -f "$plan"' EXIT
bucket="fusion.bucket_bytes=$((512 << 20))" # large enough for an expert's matrices (63 MB and 31 MB) in an eighth of it
python scripts/plan.py model=pangu_718b cluster=cloudmatrix384 "$bucket" "${layouts[@]}" --json "$plan" || status=$?
[ -s "$plan" ] || exit "${status:-1}"
[ -z "${status:-}" ] || fail "the plan does not fit in memory; choose other layouts with train= and infer="
read -r nodes dies train infer < <(python - "$plan" <<'PYTHON'
import json, re, sys
plan = json.load(open(sys.argv[1]))
def layout(name):
    sizes = re.findall(r"(etp|tp|pp|ep)(\d+)", plan["layouts"][name])
    return ",".join(f"parallel.{name}.{axis}={size}" for axis, size in sizes)
print(plan["nodes"], plan["dies_per_node"], layout("train"), layout("infer"))
PYTHON
)
if [ ${#hosts[@]} -eq 0 ] && [ -n "$dry" ]; then mapfile -t hosts < <(seq -f "node%02g" "$nodes"); fi
[ ${#hosts[@]} -eq "$nodes" ] || fail "${#hosts[@]} hosts: the plan needs $nodes with $dies dies each (--hosts FILE, or their names)"
repeated=$(printf '%s\n' "${hosts[@]}" | sort | uniq -d | paste -sd ' ')
[ -z "$repeated" ] || fail "hosts named twice: $repeated"
[ -n "$dry" ] || [[ " ${overrides[*]-}" == *" model.path="* ]] || fail "model.path=FOLDER is missing (after --)"

job=(python scripts/train.py run.name=pangu-718b cluster=cloudmatrix384 device=npu model=bfloat16 "$bucket"
  ${train//,/ } ${infer//,/ } training.recompute=true "${overrides[@]}")
"${job[@]}" --cfg job > /dev/null   # checks every key before any host is contacted

port=6379 head=${hosts[0]}
on() { # HOST COMMAND...: run the command on HOST, in this checkout and its environment
  local host=$1 line; shift
  line="cd $(printf %q "$PWD") && source scripts/environment.sh && $(printf '%q ' "$@")"
  if [ -n "$dry" ]; then printf "ssh -o BatchMode=yes %s '%s'\n" "$host" "${line% }"; else ssh -o BatchMode=yes "$host" "$line"; fi
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
ray_start=(ray start --disable-usage-stats --resources="{\"NPU\": $dies}")

[ -n "$dry" ] || trap 'rm -f "$plan"; on_all ray stop -- "${hosts[@]}"' EXIT
# Ray's default niceness of 15 leaves the cards' host threads almost nothing beside any other process that wants a core.
on "$head" "${ray_start[@]}" --head --port="$port" --system-config='{"worker_niceness": 0}'
on_all "${ray_start[@]}" --address="$head:$port" -- "${hosts[@]:1}"
on "$head" "${job[@]}"
if [ -n "$dry" ]; then
  on_all ray stop -- "${hosts[@]}"
  echo "dry run: $nodes hosts, $((nodes * dies)) dies; the plan fits"
fi
