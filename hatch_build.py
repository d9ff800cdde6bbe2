"""Builds what of the exchange is C (src/paceline/comm) while Paceline is installed.
Without a compiler Paceline is installed none the less, and exchanges without it."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (Path("src/paceline/comm/shared/kernel.c"), Path("src/paceline/comm/hosts/wire.c"))
# For any processor of the kind: what is wider is chosen when it runs (combine.h).
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared")


class Kernel(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        sources = [Path(self.root, source) for source in SOURCES]
        for source in sources:
            source.with_suffix(".so").unlink(missing_ok=True)
        wanted = os.environ.get("CC", "cc")
        compiler = next(filter(None, map(shutil.which, (wanted, "gcc", "clang"))), None)
        if compiler is None:
            self.app.display_warning("no C compiler: ranks of one host exchange without the kernel")
            return
        for source in sources:
            command = [compiler, *FLAGS, "-o", str(source.with_suffix(".so")), str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                self.app.display_warning(f"the exchange was not built:\n{done.stderr}")
                return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"] += [str(source.with_suffix(".so")) for source in SOURCES]
