"""TraceML on a case (placeholder)."""


def examine(bench, amount, kind, python):
    return {}
