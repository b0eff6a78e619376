# Makes .venv beside this folder and installs the project into it; `$1` is an extra, e.g. `[test]`.
# Sourced by the other scripts, which then find the environment's programs in "$venv/bin".

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "pd-cluster needs Python 3.11 or newer; set PYTHON to one" >&2
    exit 2
}

# Again only when what is to be installed has changed.
install() {
    local extra="$1" stamp wanted
    stamp="$venv/.installed$extra"
    wanted="$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    echo "installing pd-cluster$extra into .venv" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$root/constraints.txt" -e "$root$extra" >&2
    echo "$wanted" >"$stamp"
}
