#!/usr/bin/env bash
# A learner on the first node of a Slurm job and collectors on all of its nodes, on which amago[ray] is installed.
#   COLLECTORS=120 sbatch examples/cluster/slurm.sh train.py ARGS...
# Five minutes before the time limit the learner saves a training state; with resume="auto" in the script the same job goes on.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail

COLLECTORS=${COLLECTORS:-$((SLURM_JOB_NUM_NODES * SLURM_CPUS_PER_TASK - 2))}  # over all nodes
NODE_DIR=${NODE_DIR:-'{tmp}/amago-{user}'}        # of each node, for what is not delivered yet; not on a disk that nodes share
OPTIONS=${OPTIONS:-}                              # of amago launch, such as --updates-per-step 0.01:0.05
IP=${IP:-$(hostname -I | awk '{print $1}')}  # of the first node, on which this script runs
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}   # two jobs may share a node
BIN=${BIN:-$(dirname "$(command -v amago)")}      # of the environment, on a disk that all nodes read
export RAY_USAGE_STATS_ENABLED=0                  # Ray reports usage to its makers otherwise

nodes=()
finish() {
  trap '' INT TERM
  kill -TERM "${nodes[@]}" 2> /dev/null || true
  wait "${nodes[@]}" 2> /dev/null || true
}
trap finish EXIT

"$BIN/ray" start --head --node-ip-address "$IP" --port "$PORT" --num-cpus "$SLURM_CPUS_PER_TASK" --include-dashboard false --block \
  > "ray-head-$SLURM_JOB_ID.log" 2>&1 &
nodes+=($!)
until "$BIN/ray" health-check --address "$IP:$PORT" 2> /dev/null; do
  kill -0 "${nodes[0]}" 2> /dev/null || { cat "ray-head-$SLURM_JOB_ID.log" >&2; exit 1; }
  sleep 1
done
if ((SLURM_JOB_NUM_NODES > 1)); then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$(hostname)" \
    "$BIN/ray" start --address "$IP:$PORT" --num-cpus "$SLURM_CPUS_PER_TASK" --block > "ray-nodes-$SLURM_JOB_ID.log" 2>&1 &
  nodes+=($!)
fi

# shellcheck disable=SC2086
"$BIN/amago" launch --collectors "$COLLECTORS" --ray "$IP:$PORT" --node-dir "$NODE_DIR" $OPTIONS "$@" &
launcher=$!
trap 'kill -TERM $launcher' TERM INT
code=0
wait $launcher || code=$?
while kill -0 $launcher 2> /dev/null; do  # a signal has interrupted the wait, and the learner saves
  code=0
  wait $launcher || code=$?
done
exit $code
