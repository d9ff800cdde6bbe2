"""Synthetic results of the rungs of a ladder."""

from paceline.analyze.diagnosis.rungs import RungResult

STEP = 0.1  # seconds of a step with all parts
USED = {
    "seconds": 1.0,
    "thread": 0.97,
    "delayed": 0.0,
    "crowded": 0.0,
    "process": 1.0,
    "system": 0.02,
}
USED |= {"children": 0.0, "faults": 100.0, "host": 1.0, "squeezed": 0.0}


def rung(step=STEP, ranks=2, slow=1.0, batch=10, **used):
    """Return the results of three rounds of a rung.

    ``slow`` is the factor by which rank 1 takes longer than rank 0, ``batch`` the batch size of a
    rank.
    """
    return [
        RungResult(
            together=ranks * batch / step,
            step_s=step * turn,
            training_s=[step * turn / slow, step * turn][:ranks],
            validation_s=[0.0] * ranks,
            checkpoint_s=[0.0] * ranks,
            ranks=ranks,
            cached=10,
            silent=1,
            used=[USED | used] * ranks,
        )
        for turn in (0.999, 1.0, 1.001)
    ]
