#!/usr/bin/env bash
# Trains on all nodes of a Slurm job, one process on each, which has its node to itself; it goes on where it was.
#   sbatch --nodes 2 --gpus-per-node 8 scripts/launch_slurm.sh train --config configs/8b_8x80gb_embedded.yaml …
# The command is train or sft; run_dir must be on a file system that all nodes see. PORT is the port of the first node that
# the others meet at. A process that fails ends the others, and all are begun again on the same nodes, RESTARTS=3 times; a
# run that is done (0) or was stopped by a signal, which exits 130 or 143 after its checkpoint, is not. A
# node that is lost ends the whole job, which Slurm queues again for other nodes. With `sbatch --no-kill` it would go on
# with a list of nodes in which the lost one still is: leave that out.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail
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
    trap 'stopping=1; trap "" TERM; kill -TERM $job' TERM # which srun passes on: every host saves, and ends well
    status=0
    wait $job || status=$?
    if [ -n "$stopping" ]; then # it only interrupted the wait
        status=0
        wait $job || status=$?
        exit $status
    fi
    case $status in 0 | 130 | 143) exit $status ;; esac # done, or stopped by a signal after its checkpoint
    echo "attempt $attempt ended with exit code $status" >&2
done
exit $status
