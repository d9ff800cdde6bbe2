"""The line of an instruction, also of one that has none of its own."""

import dis

from paceline.record.ring.stack_sampler import code_line


def rises(row):
    for i in range(1, len(row)):
        if row[i] > row[i - 1]:
            print(i)


def test_jump_without_a_line_has_the_line_before_it():
    first = rises.__code__.co_firstlineno
    jumps = [one.offset for one in dis.get_instructions(rises) if one.opname == "JUMP_BACKWARD"]
    lines = [code_line(rises.__code__, offset) for offset in jumps]
    assert set(lines) <= {first + 1, first + 2, first + 3}
    assert first + 2 in lines


def test_each_instruction_has_a_line_of_its_function():
    first = rises.__code__.co_firstlineno
    lines = [code_line(rises.__code__, one.offset) for one in dis.get_instructions(rises)]
    assert set(lines) == {first, first + 1, first + 2, first + 3}
    assert code_line(rises.__code__, -1) == first
