#!/bin/bash
# One task for each GPU:  sbatch examples/pod/slurm_per_gpu.sh
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to the tasks 120 s before the time is up: they save, and end with 75.
#SBATCH --signal=TERM@120

CHECKPOINTS=${CHECKPOINTS:-$PWD/runs/digits}  # on a file system that all nodes share
export PYTHONHASHSEED=0
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/compiled}

srun --kill-on-bad-exit=1 python examples/pod/train.py --checkpoints "$CHECKPOINTS" "$@"
code=$?
case $code in
  # An exception may be one of the machine; 77 (processes differ), 78 (cannot start) and 2 are not.
  70 | 71 | 75 | 76 | 134 | 137 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
