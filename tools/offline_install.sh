#!/usr/bin/env bash
# Install Paceline without a network, from a folder of tools/offline_wheels.sh, into a virtual
# environment that also sees the packages of $PYTHON (default: python3): PyTorch comes from there.
set -euo pipefail

if (($# < 2)) || [[ $1 == -* ]]; then
    echo "Usage: tools/offline_install.sh WHEELS VENV [REQUIREMENT ...]" >&2
    exit 2
fi
wheels=$1 venv=$2
shift 2
python=${PYTHON:-python3}
compgen -G "$wheels/paceline-*" > /dev/null || {
    echo "offline_install.sh: $wheels has no wheel of Paceline. HINT: tools/offline_wheels.sh --dest $wheels" >&2
    exit 2
}
# Without pip of its own: some distributions leave ensurepip out. That of $PYTHON is used.
"$python" -m venv --without-pip --clear --system-site-packages "$venv"
# If $PYTHON is in a virtual environment itself, its packages are not those of the system.
"$python" - "$venv" <<'PYTHON'
import site, sys, sysconfig
from pathlib import Path

version = f"python{sys.version_info.major}.{sys.version_info.minor}"
paths = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths if Path(path).is_dir())
(Path(sys.argv[1]) / "lib" / version / "site-packages" / "zz_outer.pth").write_text(lines)
PYTHON
pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q --no-cache-dir --no-index)
pip+=(--find-links "$wheels")
# Paceline of this folder, whatever $PYTHON has, and then what it needs.
"${pip[@]}" --no-deps --force-reinstall paceline
"${pip[@]}" paceline "$@"
"$venv/bin/python" -m paceline --version
