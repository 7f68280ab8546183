#!/bin/bash
# All workers of a Cloud TPU slice, which has been created:  examples/pod/tpu_vm.sh NAME ZONE
# Each worker finds the others through the TPU's own metadata. CHECKPOINTS is a bucket that is mounted
# on each (gcsfuse). A launcher on each worker would add restarts, and is of use where all come back
# at once; after a preemption of the slice, this script is run again.
set -euo pipefail

name=${1:?the name of the TPU}
zone=${2:?its zone}
checkpoints=${CHECKPOINTS:-/mnt/checkpoints/digits}
gcloud=${GCLOUD:-gcloud}

run="export PYTHONHASHSEED=0 JAX_COMPILATION_CACHE_DIR=/mnt/checkpoints/compiled; "
run+="python3 examples/pod/train.py --checkpoints $(printf %q "$checkpoints")"
for _ in 1 2 3 4 5; do
  code=0
  "$gcloud" compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$run" || code=$?
  case $code in
    70 | 71 | 75 | 76 | 134 | 137 | 143) echo "exit code $code: again" >&2 ;;
    *) exit "$code" ;;
  esac
done
exit "$code"
