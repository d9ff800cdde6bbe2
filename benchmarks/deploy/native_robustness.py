"""Claims: each of 10,000 flipped bits of a model file is noticed when it is loaded; 10 million
calls need at most 1 MiB more memory than the first thousand (16 bytes lost in each call would be
150 MiB); 16 threads that call a model at the same time get the results of one.
"""

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, options, run, target
from native_programs import build_program, export, run_json

from paceline.deploy.model_file import onnxruntime_library
from paceline.deploy.native_model import NativeModel, NativeModelError

MODELS = ["mlp", "unet", "transformer"]
NOTICED = {"PACELINE_ERROR_DAMAGED", "PACELINE_ERROR_VERSION"}  # a flip may make the format newer
GROWTH_LIMIT_MIB, THREADS, SEED = 1.0, 16, 61


def main() -> None:
    parser = options("native_robustness", __doc__ or "", repeats=1)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=10_000_000, help="of the MLP, builtin")
    parser.add_argument("--thread-calls", type=int, default=2000, help="of each thread")
    parser.add_argument("--backends", default="builtin,onnxruntime")
    args = parser.parse_args()
    flips: dict[str, Any] = {}
    calls: dict[str, Any] = {}
    threads: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program = build_program("calls", folder)
        for backend in args.backends.split(","):
            for name in MODELS:
                with console.status(f"{name}, {backend}: exporting"):
                    result = export(name, "float32", folder, backend)
                assert not isinstance(result, str), result
                file = folder / f"{name}-float32-{backend}.paceline"
                with console.status(f"{name}, {backend}: {THREADS} threads"):
                    found = run_json(program, "check", file, 5, args.thread_calls, THREADS)
                threads[f"{name}, {backend}"] = found
            file = folder / f"mlp-float32-{backend}.paceline"
            with console.status(f"{backend}: flips"):
                flips[backend] = flip_bits(file, args.flips)
            number = args.calls if backend == "builtin" else args.calls // 10
            with console.status(f"{backend}: {number:,} calls"):
                calls[backend] = {"calls": number, **run_json(program, "check", file, 1, number, 1)}
    report(args, flips, calls, threads)


def flip_bits(file: Path, number: int) -> dict[str, int]:
    """Load a file many times, each time with another flipped bit. Return the error codes."""
    content, generator, codes = file.read_bytes(), random.Random(SEED), Counter[str]()
    library, flipped = onnxruntime_library(), file.with_name("flipped")
    for _ in range(number):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        flipped.write_bytes(changed)
        try:
            NativeModel(flipped, library_path=library).close()
            codes["PACELINE_OK"] += 1
        except NativeModelError as error:
            codes[error.code] += 1
    return dict(codes)


def report(args: Any, flips: Any, calls: dict[str, Any], threads: dict[str, Any]) -> None:
    targets = []
    for backend, codes in flips.items():
        missed = sum(n for code, n in codes.items() if code not in NOTICED)
        targets.append(
            target(f"{backend}: unnoticed of {sum(codes.values()):,} flips", 0, [missed], True)
        )
    for backend, one in calls.items():
        claim = f"{backend}: MiB more after {one['calls']:,} calls"
        targets.append(target(claim, GROWTH_LIMIT_MIB, [one["memory_growth_mib"]], True))
        targets.append(target(f"{backend}: calls with another result", 0, [one["different"]], True))
    for name, one in threads.items():
        claim = f"{name}: calls of {THREADS} threads with another result"
        targets.append(target(claim, 0, [one["different"]], True))
    measurements = {"flips": flips, "calls": calls, "threads": threads}
    finish(args, measurements, {}, {}, targets)


if __name__ == "__main__":
    run(main)
