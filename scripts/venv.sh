# Sourced by run, lint and test. Sets ROOT and VENV; gives say, fail and ensure_venv.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${DSV4CTL_VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[%s] %s\n' "${0##*/}" "$*" >&2; }
fail() { say "$*"; exit 1; }

check_python() {
    command -v python3 >/dev/null 2>&1 || fail "no python3 on PATH: install Python 3.11 or newer"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || fail "$(python3 -V 2>&1) is too old: Python 3.11 or newer is needed"
    python3 -c 'import ensurepip, venv' 2>/dev/null \
        || fail "python3 cannot make a virtual environment (no ensurepip): apt-get install python3-venv"
}

# ensure_venv EXTRAS: a virtual environment at $VENV with this checkout (editable) and EXTRAS installed.
# The stamp names what was installed from where, so that a second run starts at once.
ensure_venv() {
    local extras=$1 stamp=$VENV/.dsv4ctl-stamp key
    key=$( (cd "$ROOT" && pwd -P && cat pyproject.toml setup.py constraints.txt) | cksum)
    if [ -x "$VENV/bin/python" ] && [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$key" ] \
        && grep -qxF "$extras" "$stamp"; then
        return
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        check_python
        say "making the virtual environment $VENV"
        python3 -m venv "$VENV" || fail "python3 -m venv $VENV failed"
    fi
    say "installing .[$extras] (minutes the first time)"
    (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq --constraint constraints.txt --editable ".[$extras]") \
        || fail "pip install of .[$extras] failed"
    [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$key" ] || printf '%s\n' "$key" >"$stamp"
    printf '%s\n' "$extras" >>"$stamp"
    say "installed in $VENV"
}
