#!/bin/sh
# Build lib/libpaceline.so, the library that solvers call. It needs a C compiler, no Python and no PyTorch.
#   CC=clang ./build.sh [more flags of the compiler]
# OUT: another name for the library.
set -eu
cd "$(dirname "$0")"
exec ${CC:-cc} -std=gnu11 -D_GNU_SOURCE -O3 -fPIC -shared -fvisibility=hidden \
  -ffp-contract=fast -fno-math-errno -fno-trapping-math \
  -DPACELINE_BUILT_VERSION="\"${VERSION:-unknown}\"" "$@" \
  -o "${OUT:-lib/libpaceline.so}" src/*.c -Wl,-soname,libpaceline.so -lm -ldl -lpthread
