#!/usr/bin/env bash
# A learner and collectors on this machine, and collectors on others that ssh reaches; without a shared disk, BUS=sftp://this-host/path.
#   HOSTS="cpu1 cpu2" BUS=/shared/run COLLECTORS=16 examples/cluster/ssh.sh train.py ARGS...
# Ctrl-C and SIGTERM end all machines, after the learner has saved a training state; its exit code is that of this script.
set -euo pipefail

HOSTS=${HOSTS:-}
BUS=${BUS:?a directory that all machines see, or a URL}
COLLECTORS=${COLLECTORS:-8} # on each machine
OPTIONS=${OPTIONS:-}        # of amago launch, such as --updates-per-step 0.01:0.05

nodes=()
for host in $HOSTS; do
  # -tt: the collectors end when the connection does
  ssh -tt "$host" "cd $(printf %q "$PWD") && amago collect --bus $(printf %q "$BUS") --collectors $COLLECTORS $(printf '%q ' "$@")" \
    < /dev/null > "collect-$host.log" 2>&1 &
  nodes+=($!)
done
# shellcheck disable=SC2086
amago launch --bus "$BUS" --collectors "$COLLECTORS" $OPTIONS "$@" &
launcher=$!
trap 'kill -TERM $launcher' TERM INT
code=0
wait $launcher || code=$?
while kill -0 $launcher 2> /dev/null; do # a signal has interrupted the wait, and the learner saves
  code=0
  wait $launcher || code=$?
done
wait "${nodes[@]}" 2> /dev/null || true # they end with the launch
exit $code
