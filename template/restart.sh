#!/bin/sh
# Start the run, or carry on from its newest complete checkpoint.
# Usage: ./restart.sh [--gpus N] [--accept KEY,...] [KEY=VALUE ...]
# Exit codes: 0 finished; 75 stopped with its state saved, start me again; 78 change something first; other: crashed.
set -eu
cd -- "$(dirname -- "$(readlink -f -- "$0")")"
again=$(sed -n 's/^ *exit_reclaimed: *\([0-9][0-9]*\).*/\1/p' startup/nexgpu.yaml 2>/dev/null) || again=
trap 'exit "${again:-75}"' TERM INT USR1 # no rank runs yet

python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3) || python=
ready='import sys; from importlib.util import find_spec
sys.exit(sys.version_info < (3, 11) or not all(map(find_spec, ("torch", "click", "yaml"))))'
if [ -z "$python" ] || ! "$python" -c "$ready"; then
    echo "restart.sh: no Python >= 3.11 with torch, click and PyYAML, neither in .venv nor as python3 on PATH;" \
        "run startup/onstart.sh, which installs startup/requirements.txt" >&2
    exit 78
fi

# A signal that comes while Python starts waits until it can be handled, where env knows how.
set -- "$python" -m trainer launch "$@"
if env --block-signal=TERM true 2>/dev/null; then
    exec env --block-signal=TERM --block-signal=INT --block-signal=USR1 "$@"
fi
exec "$@"
