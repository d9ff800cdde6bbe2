#!/usr/bin/env bash
# Fill a folder with the wheels from which Paceline is installed on a machine without a network:
# Paceline itself from this checkout, and what it needs there, without PyTorch.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: tools/offline_wheels.sh --dest FOLDER [OPTIONS] [REQUIREMENT ...]

  --dest FOLDER       folder of the wheels; it is created
  --python VERSION    Python of the target machine, default: that of this machine (3.12)
  --machine NAME      processor of the target machine (uname -m), default: that of this machine
  --platform TAG      platform tag that pip of the target machine accepts; may be repeated.
                      Default: manylinux tags up to glibc 2.28
  --extras NAMES      extras of Paceline, separated by commas, default: data; "" for none
  --have NAME[==VERSION]  package that the target machine has already; may be repeated.
                      PyTorch always is: only its wheel is large, and the machine's own is needed
  --limit MIB         largest size of the folder, default: 50
  REQUIREMENT         other packages, such as pytest

Environment variable PYTHON: interpreter with pip that downloads, default: python3.
TEXT
}

fail() {
    echo "offline_wheels.sh: $1" >&2
    exit 2
}

python=${PYTHON:-python3}
here=$(uname -m)
dest='' version='' machine=$here extras=data limit=50
platforms=() have=(torch==2.999) more=()
while (($#)); do
    case $1 in
    -h | --help) usage && exit ;;
    --dest | --python | --machine | --platform | --extras | --have | --limit)
        (($# > 1)) || fail "$1 needs a value. HINT: tools/offline_wheels.sh --help"
        case $1 in
        --dest) dest=$2 ;;
        --python) version=$2 ;;
        --machine) machine=$2 ;;
        --platform) platforms+=("$2") ;;
        --extras) extras=$2 ;;
        --have) have+=("$2") ;;
        --limit) limit=$2 ;;
        esac
        shift 2
        ;;
    -*) fail "unknown option $1. HINT: tools/offline_wheels.sh --help" ;;
    *) more+=("$1") && shift ;;
    esac
done
[[ $dest ]] || fail "no folder. HINT: --dest wheels"
[[ $limit =~ ^[0-9]+$ ]] || fail "--limit $limit is not a number of MiB. HINT: --limit 50"
[[ $version ]] || version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version =~ ^3\.[0-9]+$ ]] || fail "--python $version is not a version. HINT: --python 3.12"
if ((!${#platforms[@]})); then
    platforms=(manylinux_2_{28,27,26,24,17,12,5}_"$machine" manylinux{2014,2010,1}_"$machine")
fi
platforms+=("linux_$machine") # Paceline's own wheel

mkdir -p "$dest"
dest=$(cd "$dest" && pwd)
rm -f "$dest"/*.whl "$dest"/paceline-*.tar.gz
root=$(cd "$(dirname "$0")/.." && pwd)
stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT

# Empty wheels stand for the packages of the target machine while pip resolves.
"$python" - "$stubs" "${have[@]}" <<'PYTHON'
import re, sys, zipfile
from pathlib import Path

folder, *packages = sys.argv[1:]
for package in packages:
    name, _, version = package.partition("==")
    name, version = re.sub(r"[-_.]+", "_", name.strip()), version or "999"
    info = f"{name}-{version}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["RECORD"] = "".join(f"{info}/{each},,\n" for each in (*files, "RECORD"))
    with zipfile.ZipFile(Path(folder) / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for each, text in files.items():
            wheel.writestr(f"{info}/{each}", text)
PYTHON

pip=("$python" -m pip --disable-pip-version-check)
export PIP_CONSTRAINT=/dev/null # those of this machine's pip do not concern the target
build=()
if [[ $machine == "$here" ]]; then
    # The C kernel needs glibc 2.17 or later only.
    "${pip[@]}" wheel -qq --no-deps --wheel-dir "$dest" "$root"
else
    # Compiled on the target machine, if it has a compiler; Paceline works without the kernel too.
    "${pip[@]}" wheel -qq --no-deps --wheel-dir "$stubs" "$root"
    "${pip[@]}" install -qq --target "$stubs/build" build
    PYTHONPATH=$stubs/build "$python" -m build --sdist --outdir "$dest" "$root" > /dev/null
    build=(hatchling)
fi
own=$(echo "$dest"/paceline-*.whl)
if [[ $machine != "$here" ]]; then # what it needs, of a wheel that is not kept
    own=$(echo "$stubs"/paceline-*.whl)
    mv "$own" "${own%-linux_*}-linux_$machine.whl"
    own=${own%-linux_*}-linux_$machine.whl
fi
name=$own
[[ $extras ]] && name="$own[$extras]"
tags=()
for tag in "${platforms[@]}"; do tags+=(--platform "$tag"); done
"${pip[@]}" download -qq --only-binary=:all: --python-version "$version" --implementation cp \
    "${tags[@]}" --find-links "$stubs" --dest "$dest" "$name" "${more[@]}" "${build[@]}"
for stub in "$stubs"/*.whl; do rm -f "$dest/$(basename "$stub")"; done

size=$(du -sm --apparent-size "$dest" | cut -f1)
echo "$dest: $(find "$dest" -type f | wc -l) files, $size MiB, for Python $version on $machine"
if ((size > limit)); then
    du -m --apparent-size "$dest"/*.whl | sort -rn | head -5 >&2
    fail "$size MiB are more than --limit $limit. HINT: --have NAME for packages that the machine has, or --limit $((size + 1))"
fi
