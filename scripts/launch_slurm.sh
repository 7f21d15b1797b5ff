#!/usr/bin/env bash
# Trains on all nodes of a Slurm job, one process per node, and resumes a run that exists.
#   sbatch --nodes 2 --gpus-per-node 8 scripts/launch_slurm.sh train --config configs/8b_8x80gb_embedded.yaml …
# The command is train or sft. run_dir must be on a file system that all nodes see. PORT is the port of jax's coordinator on
# the first node. When a process fails, jax ends the others, and this script restarts all on the same nodes, RESTARTS=3
# times. It does not restart a run that is done (0) or that a signal stopped (130 or 143, after its checkpoint). A lost node
# ends the job, and Slurm requeues it on other nodes. Do not pass `sbatch --no-kill`: the job would keep the lost node.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail
case "${1:-}" in train | sft) ;; *) sed -n '2,8s/^# //p' "$0" >&2; exit 2 ;; esac
cd "${SLURM_SUBMIT_DIR:-.}"
command=$1
shift
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
stopping=
for attempt in $(seq 0 "${RESTARTS:-3}"); do
    srun --kill-on-bad-exit=0 --cpu-bind=none --ntasks-per-node=1 bash -c 'exec .venv/bin/python -m "paravt_jax.$0" "$@" \
        hosts.num="$SLURM_NTASKS" hosts.index="$SLURM_PROCID"' "$command" "$@" hosts.coordinator="$first:$port" &
    job=$!
    trap 'stopping=1; trap "" TERM; kill -TERM $job' TERM # srun passes it on: every host saves and exits
    status=0
    wait $job || status=$?
    if [ -n "$stopping" ]; then # the signal only interrupted the wait
        status=0
        wait $job || status=$?
        exit $status
    fi
    case $status in 0 | 130 | 143) exit $status ;; esac # done, or stopped by a signal after its checkpoint
    echo "attempt $attempt ended with exit code $status" >&2
done
exit $status
