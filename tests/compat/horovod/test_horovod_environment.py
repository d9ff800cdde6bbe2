"""Horovod's environment variables: values that take effect, and the report of the others."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.compat.horovod import environment
from paceline.compat.horovod.environment import (
    OBEYED,
    WITHOUT_EFFECT,
    HorovodSettings,
    settings,
    unused_lines,
)


def test_defaults_are_those_of_horovod():
    found = settings({})
    assert (found.fusion_bytes, found.cycle_s, found.cache_capacity) == (128 << 20, 0.001, 1024)
    assert (found.stall_check_s, found.stall_shutdown_s, found.timeline) == (60, 0, "")


def test_every_field_is_set_by_a_variable():
    assert {one.field for one in OBEYED.values()} == {one.name for one in fields(HorovodSettings)}
    assert not OBEYED.keys() & WITHOUT_EFFECT.keys()


def test_values_are_read_in_the_units_of_horovod():
    found = settings(
        {
            "HOROVOD_FUSION_THRESHOLD": "33554432",
            "HOROVOD_CYCLE_TIME": " 2.5 ",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
            "HOROVOD_TIMELINE": "/tmp/t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "HOROVOD_LOG_LEVEL": "error",
        }
    )
    assert (found.fusion_bytes, found.cycle_s, found.stall_shutdown_s) == (32 << 20, 0.0025, 90)
    assert (found.timeline, found.timeline_cycles) == ("/tmp/t.json", True)
    assert not found.fuses_groups
    assert found.prints("FATAL")
    assert not found.prints("WARNING")


def test_stall_check_can_be_switched_off():
    given = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}
    assert settings(given).stall_check_s == 5
    found = settings({**given, "HOROVOD_STALL_CHECK_DISABLE": "1"})
    assert (found.stall_check_s, found.stall_shutdown_s) == (0, 0)
    assert settings({**given, "HOROVOD_STALL_CHECK_DISABLE": "0"}).stall_check_s == 5


def test_dynamic_timeline_names_no_file():
    assert settings({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64M"),
        ("HOROVOD_FUSION_THRESHOLD", "-1"),
        ("HOROVOD_CYCLE_TIME", "nan"),
        ("HOROVOD_CYCLE_TIME", "inf"),
        ("HOROVOD_STALL_CHECK_DISABLE", "maybe"),
        ("HOROVOD_LOG_LEVEL", "LOUD"),
    ],
)
def test_invalid_values_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={re.escape(value)} must be .* HINT: {name}="):
        settings({name: value})


def test_variables_without_effect_are_named_with_their_reason():
    lines = unused_lines(
        {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "3",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "5",
            "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
            "HOROVOD_MPI_THREADS_DISABLE": "1",
            "HOROVOD_CYCLE_TIME": "5",
        }
    )
    assert len(lines) == 2
    names = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES, HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
    assert lines[0].startswith(f"{names}: no effect, ")
    assert lines[1].startswith("HOROVOD_MPI_THREADS_DISABLE: no effect, ")


def test_page_names_every_variable():
    page = Path(__file__).parents[3] / "docs/reference/interfaces/horovod.md"
    named = set(re.findall(r"`(HOROVOD_[A-Z0-9_]+)`", page.read_text()))
    assert {*OBEYED, *WITHOUT_EFFECT, environment._STALL_CHECK_DISABLE} <= named
