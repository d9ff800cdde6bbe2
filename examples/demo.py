"""A minute with Paceline: a real training loses a rank, and goes on. ``make demo`` runs it."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = "run/demo"
RUN = (
    "run -n 2 --max-restarts 1 examples/digits.py "
    f"--checkpoint {CHECKPOINTS} --every 100 --kill-at 450"
)
SHOWN = f"$ paceline {RUN}".replace(" --checkpoint", " \\\n    --checkpoint")
BEFORE = """
Two ranks on this machine's CPU train a small convolutional network on scikit-learn's
handwritten digits: 30 epochs, 690 optimizer steps, a checkpoint every 100 steps.
At step 450 rank 1 kills itself with SIGKILL, as the system does when memory runs out.
Expect Paceline to name the rank, to start again from step 400, and to finish the training.
"""
AFTER = """
What you saw: rank 1 died of a real SIGKILL at step 450, Paceline ended the other rank, started
both again, and training went on from step 400, in the middle of an epoch, to the same accuracy
as a run that nobody disturbs. The table is the record of the last start: "useful" is training,
"transfer" and "wait" are the price of two ranks, which is high here because the model is tiny.
"""
NEXT = """
Try next, here in {root}:
  {paceline} run -n 4 examples/digits.py       the same accuracy on 4 ranks
  {paceline} run -n 2 examples/surrogate.py    a network that stands in for a chemical method
"""


def run(arguments):
    """Paceline with live output; its exit code. Ctrl-C is its to handle, and then ours."""
    command = [Path(sys.executable).parent / "paceline", *arguments]
    try:
        process = subprocess.Popen(command, cwd=ROOT)
    except FileNotFoundError:
        sys.exit(f"there is no {command[0]}. HINT: pip install -e '.[examples]'")
    try:
        return process.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # the terminal told us alone
            process.terminate()
            process.wait()
        return 130


def main():
    print(f"{BEFORE}\n{SHOWN}\n", flush=True)
    shutil.rmtree(ROOT / CHECKPOINTS, ignore_errors=True)
    code = run(RUN.split())
    if code == 0:
        paceline = Path(sys.executable).parent / "paceline"
        if paceline.is_relative_to(ROOT):
            paceline = paceline.relative_to(ROOT)
        print(AFTER + NEXT.format(root=ROOT, paceline=paceline))
    return code


if __name__ == "__main__":
    sys.exit(main())
