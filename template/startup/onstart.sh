#!/bin/sh
# Boot entry: make the environment of the run where something is missing, then start or carry on.
# Usage: startup/onstart.sh [what restart.sh takes]      PYTHON=... names the interpreter that .venv is made with.
# Exit codes: those of restart.sh; 1 where packages could not be installed (another start may find the network).
set -eu
cd -- "$(dirname -- "$(readlink -f -- "$0")")/.."
started=
again=$(sed -n 's/^ *exit_reclaimed: *\([0-9][0-9]*\).*/\1/p' startup/nexgpu.yaml 2>/dev/null) || again=
trap '[ -z "$started" ] || kill "$started" 2>/dev/null; exit "${again:-75}"' TERM INT USR1 # no rank runs yet

# Prints the pins that are not there, one a line.
missing='import re, sys
from importlib.metadata import PackageNotFoundError, version
for pin in re.findall(r"(?m)^([\w.-]+)==([^\s;]+) *(?:\\|$)", open("startup/requirements.txt").read()):
    try:
        there = version(pin[0]).partition("+")[0]
    except PackageNotFoundError:
        there = "none"
    if there != pin[1].partition("+")[0]:
        print("==".join(pin))'

# Runs a command so that a signal need not wait for its end.
run() {
    "$@" &
    started=$!
    code=0
    wait "$started" || code=$?
    started=
    return "$code"
}

find_python() {
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "onstart.sh: no Python >= 3.11 on PATH; install one, or name it: PYTHON=/path/to/python3" >&2
    exit 78
}

make_environment() {
    python=$(find_python) || exit
    options=--system-site-packages # the image's own torch, where it is the pinned one
    case $("$python" -c "$missing") in torch==*) options= ;; esac
    "$python" -c 'import ensurepip' 2>/dev/null || options="$options --without-pip"
    echo "onstart.sh: making .venv with $python" >&2
    # shellcheck disable=SC2086 # two options, or one, or none
    run "$python" -m venv --clear $options .venv || {
        echo "onstart.sh: $python cannot make .venv; install its venv module (Debian: apt-get install python3-venv)" >&2
        exit 78
    }
}

install() {
    # An environment without a pip of its own is filled by the interpreter's.
    if .venv/bin/python -c 'import pip' 2>/dev/null; then
        set -- .venv/bin/python -m pip install "$@"
    else
        set -- "$(find_python)" -m pip --python .venv/bin/python install "$@"
    fi
    run "$@" --quiet --no-input --disable-pip-version-check || {
        echo "onstart.sh: the packages of startup/requirements.txt could not be installed (see above)" >&2
        exit 1
    }
}

.venv/bin/python -c '' 2>/dev/null || make_environment
wanted=$(.venv/bin/python -c "$missing")
if [ -n "$wanted" ]; then
    echo "onstart.sh: installing $(echo "$wanted" | tr '\n' ' ')" >&2
    torch=$(echo "$wanted" | grep '^torch==' || true)
    [ -z "$torch" ] || install "$torch"
    grep -v '^torch==' startup/requirements.txt >.venv/rest.txt
    install --require-hashes --no-deps --requirement .venv/rest.txt
fi

exec ./restart.sh "$@"
