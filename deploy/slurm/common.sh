# shellcheck shell=bash
# What the batch scripts share; submit.sh sets DAPO_HOME, DAPO_RECIPE, DAPO_RUN and DAPO_STATE.
#
# A job that is told to end drains first. Told by USR1 (near its time limit, or because it is
# pre-empted where Slurm is told to send it first) it puts itself back into the queue, and the run
# goes on where it was; told by TERM (scancel) it ends. bash runs a trap only after a command in the
# foreground has ended: hence `command & wait`.

export PYTHON="$DAPO_HOME/.venv/bin/python"
readonly NOT_TO_BE_REPEATED=2 # an error that a person has to mend
readonly STARTS=6
readonly SERVER_S=${DAPO_SERVER_WAIT_S:-1800}
asked=

say() { echo "$(date +%FT%T) ${SLURM_JOB_NAME:-slurm}: $*" >&2; }

# node_address NODE: the address at which Slurm itself reaches a node
node_address() {
    scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
}

# find_server: set the variables of the server job; fails where it has not written its address yet
find_server() {
    [ -z "${DAPO_SERVER_GIVEN:-}" ] || return 0
    unset DAPO_REDIS_PASSWORD
    export DAPO_REDIS_PASSWORD_FILE="$DAPO_STATE/password"
    DAPO_REDIS_URL=$(cat "$DAPO_STATE/address" 2>/dev/null) || return
    export DAPO_REDIS_URL
}

# await_server: wait for the server job, but not for ever with a GPU in the hand
await_server() {
    local since=$SECONDS
    until find_server || [ -n "$asked" ]; do
        if [ $((SECONDS - since)) -gt "$SERVER_S" ]; then
            say "no server for $SERVER_S s; see the log of its job (squeue, logs/slurm-server-*.out)"
            exit 1
        fi
        sleep 1 &
        wait $! || true
    done
}

# on_signal NAME: remember it, and tell the child to drain
on_signal() {
    asked=$1
    say "$1: draining"
    [ -z "${child:-}" ] || drain 2>/dev/null || true
}
drain() { kill -TERM "$child"; }
trap 'on_signal TERM' TERM
trap 'on_signal USR1' USR1

# attend COMMAND…: run it, pass signals on, and return its status
attend() {
    local status=0
    "$@" &
    child=$!
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # a trap interrupted the wait
        status=0
        wait "$child" || status=$?
    done
    child=
    return "$status"
}

# serve COMMAND…: keep a role alive on this node until it is done or told to end
serve() {
    local status starts=0
    while [ -z "$asked" ]; do
        await_server
        [ -z "$asked" ] || break
        status=0
        attend "$@" || status=$?
        if [ "$status" -eq 0 ] || [ -n "$asked" ]; then
            break
        fi
        starts=$((starts + 1))
        say "ended with status $status (start $starts of $STARTS)"
        if [ "$status" -eq "$NOT_TO_BE_REPEATED" ] || [ "$starts" -ge "$STARTS" ]; then
            exit "$status"
        fi
        sleep $((5 * 2 ** (starts - 1))) &
        wait $! || true
    done
    [ "$asked" != USR1 ] || requeue
}

# requeue: back into the queue, with the same number
requeue() {
    say "drained; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
}
