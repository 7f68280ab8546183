#!/bin/bash
# One launcher on each node: restarts take seconds and no new place in the queue, each process has a
# log of its own, and the first cause stands first.  sbatch examples/pod/slurm_launch.sh
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120

CHECKPOINTS=${CHECKPOINTS:-$PWD/runs/digits}  # on a file system that all nodes share
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COORDINATOR=$first:${PORT:-29876} CHECKPOINTS

# shellcheck disable=SC2016  # SLURM_NODEID is that of each task
srun bash -c 'exec distjax launch --processes 1 --nodes "$SLURM_NNODES" \
  --node-rank "$SLURM_NODEID" --coordinator "$COORDINATOR" --max-restarts 3 --grace-seconds 100 \
  --result-dir "runs/$SLURM_JOB_ID" examples/pod/train.py --checkpoints "$CHECKPOINTS" "$@"' _ "$@"
code=$?
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
