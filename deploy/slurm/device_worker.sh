#!/bin/bash
# Runs the device worker of one task of a Slurm step: device_worker.sh NAME. A worker that ends by
# itself is started again. The end of standard input, TERM or INT makes it drain, and ends this.
set -u

host=$1-$SLURM_NODEID
export ROUNDHOUSE_DEVICE=$host.$SLURM_LOCALID
export ROUNDHOUSE_DRAIN_S=${ROUNDHOUSE_DRAIN_S:-150} # within the seconds of --signal

# The key of the host lies in the shared home, everything else on the node's own disk.
key=${ROUNDHOUSE_HOME:?name a folder that all nodes share}/$host/run/signing.key
local=${TMPDIR:-/tmp}/roundhouse-$(id -u)
export ROUNDHOUSE_HOME=$local/$host
umask 077
mkdir -p "$local"
[ -O "$local" ] && [ ! -L "$local" ] || { echo "$local belongs to another account" >&2; exit 1; }
mkdir -p "$ROUNDHOUSE_HOME/run"
if ! cmp -s "$key" "$ROUNDHOUSE_HOME/run/signing.key"; then
    draft=$(mktemp "$ROUNDHOUSE_HOME/run/signing.key.XXXXXX")
    cp "$key" "$draft" || exit 1
    mv "$draft" "$ROUNDHOUSE_HOME/run/signing.key" # at once: other tasks of the node do the same
fi

# Of the GPUs that the step has on this node, the one with this task's number.
IFS=, read -ra gpus <<<"${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}"
if [ "${#gpus[@]}" -gt 0 ]; then
    export ROUNDHOUSE_DEVICE_KIND=${ROUNDHOUSE_DEVICE_KIND:-cuda}
    export ROUNDHOUSE_ACCELERATOR=${gpus[SLURM_LOCALID]:?this node has more tasks than GPUs}
    unset CUDA_VISIBLE_DEVICES
fi

worker='' is_stopping=''
stop() {
    is_stopping=yes
    [ -z "$worker" ] || kill -TERM "$worker"
}
trap stop TERM INT
{ cat >/dev/null; kill -TERM $$; } <&0 &

until [ -n "$is_stopping" ]; do
    celery -A workers.device.worker worker --pool threads -c 2 \
        -Q "device.$ROUNDHOUSE_DEVICE" -n "device.$ROUNDHOUSE_DEVICE@%h" -l WARNING </dev/null &
    worker=$!
    [ -z "$is_stopping" ] || stop
    while kill -0 "$worker" 2>/dev/null; do wait "$worker"; done
    worker=''
    [ -n "$is_stopping" ] || { sleep 5 & wait $!; }
done
