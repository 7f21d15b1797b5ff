#!/usr/bin/env bash
# Trains on all nodes of a Slurm job, one process per node, and resumes a run that exists.
#   sbatch --nodes 2 --gpus-per-node 8 scripts/launch_slurm.sh train --config configs/8b_8x80gb_embedded.yaml …
# The command is train or sft. run_dir must be on a file system that all nodes see. PORT is the port of jax's coordinator on
# the first node. When a process fails, jax ends the others, and this script restarts all on the same nodes, RESTARTS=3
# times. It does not restart a run that is done (0), that a signal stopped (130 or 143, after its checkpoint), or whose
# command is wrong (2, 126 or 127). A lost node ends the job, and Slurm requeues it on other nodes. Do not pass
# `sbatch --no-kill`: the job would keep the lost node.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail
case "${1:-}" in train | sft) ;; *) sed -n '2,9s/^# //p' "$0" >&2; exit 2 ;; esac
refuse() { echo "launch_slurm: $1" >&2; exit 2; }
[ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_JOB_NODELIST:-}" ] || refuse "this is not a Slurm job; start it with sbatch"
[[ ${RESTARTS:=3} =~ ^[0-9]+$ ]] || refuse "RESTARTS=$RESTARTS is not a number of restarts"
cd "${SLURM_SUBMIT_DIR:-.}"
[ -x .venv/bin/python ] || refuse "$PWD has no .venv/bin/python; run sbatch in a clone, after scripts/setup.sh cuda12"
command=$1
shift
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # without a pipe to head, which breaks with many nodes
first=${nodes%%$'\n'*}
[ -n "$first" ] || refuse "scontrol lists no node of SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
port=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
stopping= job=
stop() { # srun passes the signal on: every host saves and exits
    stopping=1
    [ -n "$job" ] || return 0 # ignoring it now would make srun ignore it too
    trap "" TERM
    kill -TERM "$job" || true
}
trap stop TERM
for attempt in $(seq 0 "$RESTARTS"); do
    [ -z "$stopping" ] || exit 143
    srun --kill-on-bad-exit=0 --cpu-bind=none --ntasks-per-node=1 bash -c 'exec .venv/bin/python -m "paravt_jax.$0" "$@" \
        hosts.num="$SLURM_NTASKS" hosts.index="$SLURM_PROCID"' "$command" "$@" hosts.coordinator="$first:$port" &
    job=$!
    [ -z "$stopping" ] || stop # it came while srun started
    status=0
    wait $job || status=$?
    if [ -n "$stopping" ]; then # the signal only interrupted the wait
        status=0
        wait $job || status=$?
        exit $status
    fi
    job=
    case $status in 0 | 130 | 143 | 2 | 126 | 127) exit $status ;; esac # see above
    echo "attempt $attempt ended with exit code $status" >&2
done
exit $status
