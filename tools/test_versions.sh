#!/usr/bin/env bash
# Run the quick tests with each pair of a Python and a PyTorch version, in a virtual environment each.
# Arguments: Python versions, PyTorch versions ("newest": no constraint), and pytest's arguments.
set -uo pipefail
cd "$(dirname "$0")/.."
pythons=$1 torches=$2
shift 2
failed=()
for version in $pythons; do
    for torch in $torches; do
        name=python$version-torch$torch venv=run/versions/python$version-torch$torch
        echo "== Python $version, PyTorch $torch"
        if ! command -v "python$version" > /dev/null; then
            echo "python$version is not installed. HINT: make test-versions PYTHONS=3.11" >&2
            failed+=("$name")
            continue
        fi
        wanted=torch
        [[ $torch == newest ]] || wanted="torch==$torch.*"
        {
            [[ -x $venv/bin/python ]] || "python$version" -m venv "$venv"
            "$venv/bin/pip" install -q --disable-pip-version-check "$wanted" &&
                "$venv/bin/pip" install -q --disable-pip-version-check -e '.[data,formats,examples,dev]' "$wanted" &&
                "$venv/bin/python" -c 'import torch; print("torch", torch.__version__)' &&
                "$venv/bin/pytest" -q --reruns 1 -n 2 --dist worksteal \
                    -m "not soak and not long and not bench and not alone and not gpu" "$@"
        } || failed+=("$name")
    done
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
