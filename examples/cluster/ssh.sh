#!/usr/bin/env bash
# A learner on this machine and collectors here and on other machines that ssh reaches, on which amago[ray] is installed.
#   HOSTS="cpu1 cpu2" COLLECTORS=64 examples/cluster/ssh.sh train.py ARGS...
# Ctrl-C and SIGTERM end all machines, after the learner has saved a training state; its exit code is that of this script.
set -euo pipefail

HOSTS=${HOSTS:-}                                  # the other machines
COLLECTORS=${COLLECTORS:-8}                       # over all machines
NODE_DIR=${NODE_DIR:-'{tmp}/amago-{user}'}        # of each machine, for what is not delivered yet
OPTIONS=${OPTIONS:-}                              # of amago launch, such as --updates-per-step 0.01:0.05
IP=${IP:-$(hostname -I | awk '{print $1}')}  # of this machine, as the others see it
PORT=${PORT:-6379}
SSH=${SSH:-ssh -tt}                               # with a terminal: what runs there ends when ssh does
BIN=${BIN:-$(dirname "$(command -v amago)")}      # of the environment, the same on each machine
export RAY_USAGE_STATS_ENABLED=0                  # Ray reports usage to its makers otherwise

nodes=()
finish() {
  trap '' INT TERM
  kill -TERM "${nodes[@]}" 2> /dev/null || true
  wait "${nodes[@]}" 2> /dev/null || true
}
trap finish EXIT

setsid "$BIN/ray" start --head --node-ip-address "$IP" --port "$PORT" --include-dashboard false --block < /dev/null > ray-head.log 2>&1 &
nodes+=($!)
until "$BIN/ray" health-check --address "$IP:$PORT" 2> /dev/null; do
  kill -0 "${nodes[0]}" 2> /dev/null || { cat ray-head.log >&2; exit 1; }
  sleep 1
done
for host in $HOSTS; do
  setsid $SSH "$host" "RAY_USAGE_STATS_ENABLED=0 $BIN/ray start --address $IP:$PORT --block" < /dev/null > "ray-$host.log" 2>&1 &
  nodes+=($!)
done

# shellcheck disable=SC2086
"$BIN/amago" launch --collectors "$COLLECTORS" --ray "$IP:$PORT" --node-dir "$NODE_DIR" $OPTIONS "$@" &
launcher=$!
trap 'kill -TERM $launcher' TERM
trap 'kill -INT $launcher' INT
code=0
wait $launcher || code=$?
while kill -0 $launcher 2> /dev/null; do  # a signal has interrupted the wait, and the learner saves
  code=0
  wait $launcher || code=$?
done
exit $code
