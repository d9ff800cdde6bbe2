"""Builds what is C while Paceline is installed: parts of the exchange (src/paceline/comm), and the
library that calls exported models (src/paceline/deploy/native). Without a compiler Paceline is
installed none the less, exchanges without them, and `paceline export` says what is missing."""

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
RUNTIME = Path("src/paceline/deploy/native")  # users build it with the same script
RUNTIME_LIBRARY = RUNTIME / "lib" / "libpaceline.so"


class Kernel(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        sources = [Path(self.root, source) for source in SOURCES]
        built = [source.with_suffix(".so") for source in SOURCES] + [RUNTIME_LIBRARY]
        for library in built:
            Path(self.root, library).unlink(missing_ok=True)
        wanted = os.environ.get("CC", "cc")
        compiler = next(filter(None, map(shutil.which, (wanted, "gcc", "clang"))), None)
        if compiler is None:
            self.app.display_warning("no C compiler: ranks of one host exchange without the kernel")
            return
        commands = [
            [compiler, *FLAGS, "-o", str(one.with_suffix(".so")), str(one)] for one in sources
        ]
        commands.append(["sh", str(Path(self.root, RUNTIME, "build.sh"))])
        environment = {**os.environ, "CC": compiler, "VERSION": self.metadata.version}
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                self.app.display_warning(f"{command[-1]} was not built:\n{done.stderr}")
                return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"] += [str(library) for library in built]
