#!/usr/bin/env bash
# A learner on the first node of a Slurm job, and collectors on all of its nodes. The bus is a directory that all nodes see.
#   sbatch examples/cluster/slurm.sh train.py ARGS...
# Five minutes before the time limit the learner saves a training state; with resume="auto" in the script the same job goes on.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail

BUS=${BUS:-$PWD/bus-${SLURM_JOB_NAME:-run}}            # or s3://bucket/run
COLLECTORS=${COLLECTORS:-$((SLURM_CPUS_PER_TASK - 2))} # on each node
NODE_DIR=${NODE_DIR:-${TMPDIR:-$HOME/.cache}/amago-$USER} # of each node, for what is not delivered yet, best on its own disk
OPTIONS=${OPTIONS:-}                                    # of amago launch, such as --updates-per-step 0.01:0.05

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --overlap \
  amago collect --bus "$BUS" --collectors "$COLLECTORS" --node-dir "$NODE_DIR" "$@" > "collect-${SLURM_JOB_ID:-0}.log" 2>&1 &
nodes=$!
# shellcheck disable=SC2086
amago launch --bus "$BUS" $OPTIONS "$@" &
launcher=$!
trap 'kill -TERM $launcher' TERM INT
code=0
wait $launcher || code=$?
while kill -0 $launcher 2> /dev/null; do # a signal has interrupted the wait, and the learner saves
  code=0
  wait $launcher || code=$?
done
wait $nodes || true # they end with the launch
exit $code
