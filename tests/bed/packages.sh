#!/bin/bash
# What tests need from Debian or Ubuntu: real ssh, Slurm and MPI, Chromium, which opens pages,
# squashfs and jemalloc, and compilers, MPI's headers, CMake, pkg-config and valgrind for programs that
# call models.
# Nothing is started.
set -eu
PACKAGES="iproute2 openssh-client openssh-server munge slurmctld slurmd slurm-client
  slurm-wlm-torque openmpi-bin mpich procps chromium
  squashfs-tools squashfuse libjemalloc2 gcc g++ gfortran libopenmpi-dev make cmake pkg-config valgrind"

command -v apt-get >/dev/null || {
  echo "No apt-get here. HINT: install the like of: $(echo $PACKAGES)" >&2; exit 1; }
absent=$(for p in $PACKAGES; do
  dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || echo "$p"; done)
[ -n "$absent" ] || exit 0
[ "$(id -u)" = 0 ] || exec sudo "$BASH" "$0"

log=$(mktemp); policy=/usr/sbin/policy-rc.d; ours=
finish() { [ -z "$ours" ] || rm -f "$policy"; rm -f "$log"; }
trap finish EXIT
if [ ! -e "$policy" ]; then # while it stands, packages do not start their daemons
  ours=1; printf '#!/bin/sh\nexit 101\n' > "$policy"; chmod 755 "$policy"
fi
get() { DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" >>"$log" 2>&1 </dev/null; }
echo "Installing" $absent "..."
get install -y --no-install-recommends $absent ||
  { get update && get install -y --no-install-recommends $absent; } ||
  { cat "$log" >&2; exit 1; }
