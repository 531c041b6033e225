#!/usr/bin/env bash
# For platforms that do not read exit codes: start the run again after the code that means "start me again" (75),
# stop at every other one, hand signals on. The process that a platform signals may be this one, even as PID 1.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 78
again=75 # restart.exit_reclaimed
pause=${RESTART_PAUSE:-60} # seconds; a machine that is being taken away is gone by then
stop=
run=
listen() { trap 'stop=yes; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null' TERM INT USR1; }
listen

while true; do
    bash startup/onstart.sh "$@" &
    run=$!
    [ -z "$stop" ] || kill -TERM "$run"
    while kill -0 "$run" 2>/dev/null; do wait "$run"; done # a signal ends `wait` early
    trap '' TERM INT USR1 # and must not spoil the exit code of what has just ended
    wait "$run"
    code=$?
    [ "$code" -ge 0 ] || code=$again # bash has lost it among many signals: this one is never wrong
    run=
    listen
    if [ "$code" -ne "$again" ] || [ -n "$stop" ]; then break; fi
    echo "until-done.sh: again in $pause s" >&2
    sleep "$pause" &
    wait $!
    [ -z "$stop" ] || break
done

# A RunPod container that ends is started again, and paid for: stop the pod instead.
if [ -n "${RUNPOD_POD_ID:-}" ] && [ -z "$stop" ] && command -v runpodctl >/dev/null; then
    runpodctl stop pod "$RUNPOD_POD_ID"
fi
exit "$code"
