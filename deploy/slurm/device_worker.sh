#!/bin/bash
# Runs the device worker of one node of a Slurm step: device_worker.sh NAME CPUS. A worker that ends
# by itself is started again. The end of standard input, TERM or INT makes it drain, and ends this.
set -u

host=$1-$SLURM_NODEID
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
    mv "$draft" "$ROUNDHOUSE_HOME/run/signing.key"
fi

# The devices of this node: all GPUs that the step has here, numbered in the order of Slurm's list, so
# that the next job has the same names; else so many CPU devices.
IFS=, read -ra gpus <<<"${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}"
devices='' queues=device.$host count=0
add() {
    devices+=${devices:+,}$host.$count=$1
    queues+=,device.$host.$count
    count=$((count + 1))
}
for gpu in "${gpus[@]}"; do add "${ROUNDHOUSE_DEVICE_KIND:-cuda}:$gpu"; done
[ "$count" -gt 0 ] || for ((n = 0; n < $2; n++)); do add cpu; done
export ROUNDHOUSE_DEVICES=$devices
unset CUDA_VISIBLE_DEVICES

worker='' is_stopping=''
stop() {
    is_stopping=yes
    [ -z "$worker" ] || kill -TERM "$worker"
}
trap stop TERM INT
{ cat >/dev/null; kill -TERM $$; } <&0 &

until [ -n "$is_stopping" ]; do
    celery -A workers.device.worker worker --pool threads -c 2 \
        -Q "$queues" -n "host.$host@%h" -l WARNING </dev/null &
    worker=$!
    [ -z "$is_stopping" ] || stop
    while kill -0 "$worker" 2>/dev/null; do wait "$worker"; done
    worker=''
    [ -n "$is_stopping" ] || { sleep 5 & wait $!; }
done
