#!/usr/bin/env bash
# Ray starts the collectors. On the learner's machine, after `ray start` on all of them with a token:
#   export RAY_AUTH_MODE=token; ray get-auth-token --generate     # once; copy ~/.ray/auth_token to the other machines
#   ray start --head                                              # here
#   ray start --address LEARNER:6379                              # there, also with RAY_AUTH_MODE=token
#   BUS=/shared/run COLLECTORS=64 examples/cluster/ray.sh train.py ARGS...
set -euo pipefail
export RAY_AUTH_MODE=token
# shellcheck disable=SC2086
exec amago launch --bus "${BUS:?a directory that all machines see, or a URL}" --ray "${RAY:-auto}" --collectors "${COLLECTORS:-64}" ${OPTIONS:-} "$@"
