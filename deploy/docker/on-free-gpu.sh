#!/bin/bash
# Give a process the first GPU that no other one started by this script holds: the replicas of a
# scaled service are equal, so none of them can be told which GPU is its own.
# usage: on-free-gpu.sh LOCKS "GPUS …" COMMAND…
# LOCKS is a folder that the containers share; each of GPUS is a value of CUDA_VISIBLE_DEVICES, with
# commas for tensor parallelism: "1 2 3" or "0,1 2,3".
set -euo pipefail
locks=$1 gpus=$2
shift 2
mkdir -p "$locks"
for gpu in $gpus; do
    # the open file goes through exec, so that the lock ends with the process, however that ends
    exec 9>"$locks/gpu-$gpu"
    if flock --nonblock 9; then
        export CUDA_VISIBLE_DEVICES=$gpu
        exec "$@"
    fi
done
echo "on-free-gpu: every GPU of \"$gpus\" is taken; name more of them, or start fewer replicas" >&2
exit 2
