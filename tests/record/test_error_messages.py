"""Explanations of other libraries' errors, also in scripts without Paceline's API."""

from paceline.record.hooks.error_messages import explain_error, summarize_error

NCCL = """NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"""


def test_two_ranks_on_one_gpu_are_named_with_the_way_out():
    text = explain_error(RuntimeError(NCCL))
    assert "rank 0 and rank 1 both on CUDA device 60" in text
    assert "HINT: start at most one rank for each GPU" in text
    assert summarize_error(RuntimeError(NCCL)).startswith("RuntimeError: NCCL refuses two ranks")
    assert explain_error(RuntimeError("another")) is None
