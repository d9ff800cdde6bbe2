"""Molecules and Joback's estimates of nine properties, from the files of PyPI's ``chemicals``.

Inputs are counts read off the formula and the SMILES string. The targets are melting point,
enthalpies of fusion and of vaporisation, boiling point, critical temperature, logarithm of the
critical pressure, critical volume, enthalpy of formation, and heat capacity at 300 K.
"""

import math
import re
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

TEST_ROWS = 2860  # of 28,860
MIN_ROWS = 200  # a count is an input if at least so many molecules have it
ELEMENT = re.compile(r"([A-Z][a-z]?)(\d*)")
STEREO_CENTRE = re.compile(r"\[C@+H?\]")
SYMBOL = re.compile(r"\[[^\]]*\]|Br|Cl|%\d\d|[A-Za-z=#()\d]")


def count_parts(formula, smiles):
    """How often each element and each pair of neighbouring SMILES symbols occurs."""
    counts = Counter()
    for element, number in ELEMENT.findall(formula):
        counts[element] += int(number or 1)
    symbols = SYMBOL.findall(STEREO_CENTRE.sub("C", smiles))
    symbols = ["ring" if s[0] == "%" or s.isdigit() else s for s in symbols]
    counts.update(pairwise(["start", *symbols, "end"]))
    return counts


def read_molecules():
    """Parts and the nine targets of each molecule that has both."""
    folder = Path(find_spec("chemicals").origin).parent  # found, not imported: that takes seconds
    joback, parts, targets, seen = {}, [], [], set()
    with open(folder / "Misc/joback_predictions.tsv", encoding="utf-8") as file:
        next(file)  # CAS Tm Hfus Hvap Tb Tc Pc Vc Hfg Cpg0 Cpg1 Cpg2 Cpg3 mul0 mul1
        for line in file:
            cas, *values = line.rstrip("\n").split("\t")
            if all(values[:12]):
                joback[cas] = tuple(values[:12])
    with open(folder / "Identifiers/chemical identifiers pubchem large.tsv", encoding="utf-8") as f:
        for line in f:
            _, cas, formula, mass, smiles, _ = line.split("\t", 5)
            values = joback.get(cas.replace("-", ""))
            if values is None or float(mass) > 500 or "." in smiles:  # "." joins salts, mixtures
                continue
            # Isomers that Joback's groups can't tell apart count once: no twins in the test set.
            if (formula, values) in seen:
                continue
            seen.add((formula, values))
            tm, hfus, hvap, tb, tc, pc, vc, hf, a, b, c, d = map(float, values)
            cp = a + b * 300 + c * 300**2 + d * 300**3
            parts.append(count_parts(formula, smiles))
            targets.append((tm, hfus, hvap, tb, tc, math.log(pc), vc, hf, cp))
    return parts, targets


def load_data():
    """Training and test set, standardised by the training set."""
    parts, targets = read_molecules()
    rows = Counter(part for counts in parts for part in counts)
    inputs = [part for part in rows if rows[part] >= MIN_ROWS]
    x = torch.tensor([[counts[part] for part in inputs] for counts in parts], dtype=torch.float32)
    y = torch.tensor(targets, dtype=torch.float64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:-TEST_ROWS], order[-TEST_ROWS:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    y = ((y - y[train].mean(0)) / y[train].std(0)).float()
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])
