"""Broadcasts, objects and SyncBatchNorm on 1, 2 and 4 ranks; see functions_checks.py."""

import io
import os
import pickle
from collections import OrderedDict

import pytest
import torch
from horovod_checks import Results, names, passed

from paceline.compat.horovod.torch.objects import DATA, PICKLE, UNSENDABLE, decode, encode

FILE = "functions_checks.py"


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return Results(FILE, tmp_path_factory.mktemp("functions"))


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", names(FILE))
def test_functions(results, name, size):
    passed(results, name, size)


class Thing:
    pass


def test_pickles_are_refused_where_ranks_have_not_proved_membership(monkeypatch):
    monkeypatch.delenv("PACELINE_STORE_PORT", raising=False)
    kind, reason = encode(Thing())
    assert kind == UNSENDABLE
    assert b"an object of type Thing would be pickled" in reason
    assert b"HINT: start the job with paceline run" in reason
    with pytest.raises(ValueError, match=r"thing \(rank 1\): an object of type Thing"):
        decode(kind, reason, "thing (rank 1)")
    with pytest.raises(ValueError, match="object of the unknown kind 1"):
        decode(PICKLE, pickle.dumps(Thing()), "thing")
    kind, data = encode({"model": OrderedDict(weight=torch.ones(2))})
    assert kind == DATA
    assert torch.equal(decode(kind, data, "state")["model"]["weight"], torch.ones(2))


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


@pytest.mark.parametrize("private", [True, False])
def test_data_of_another_rank_executes_no_code(monkeypatch, tmp_path, private):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_STORE_PORT", raising=False)
    if private:
        monkeypatch.setenv("PACELINE_STORE_PORT", "1")
    file = io.BytesIO()
    torch.save({"skeleton": Attack(), "tensors": []}, file)
    _, data = encode([1, "two"])
    for bad in (
        file.getvalue(),
        b"",
        b"PK\x03\x04",
        data[:-20],
        data.replace(b"two", b"t\xff\xfe"),
    ):
        with pytest.raises(ValueError, match=r"^mine "):
            decode(DATA, bad, "mine")
    assert list(tmp_path.iterdir()) == []
