"""How PyTorch was built, and the vector units that it uses, from artificial processors."""

import pytest
import torch

from paceline.study.probe.measure import torch_build as measure

X86 = "processor : 0\nflags\t\t: fpu sse2 {}\nmodel name : Any\n"
ARM = "processor : 0\nFeatures\t: fp asimd {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "vector_bytes", "capability"),
    [
        (X86.format("avx fma avx2 avx512f avx512dq avx512bw avx512vl"), "", "AVX512"),
        (X86.format("avx fma avx2 avx512f"), "", "AVX2"),  # as on Xeon Phi: PyTorch needs the rest
        (X86.format("avx fma"), "", "DEFAULT"),
        (X86.format("avx2"), "", "DEFAULT"),  # without FMA
        (ARM.format("sve"), "32", "SVE256"),
        (ARM.format("sve sve2"), "16", "DEFAULT"),
        (ARM.format(""), "", "DEFAULT"),
        ("processor : 0\ncpu : POWER9, altivec supported\n", "", ""),
    ],
)
def test_capability_of_processor(tmp_path, cpuinfo, vector_bytes, capability):
    (tmp_path / "proc/sys/abi").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    if vector_bytes:
        (tmp_path / "proc/sys/abi/sve_default_vector_length").write_text(f"{vector_bytes}\n")
    assert measure.processor_capability(tmp_path) == capability


def test_libraries_in_configuration():
    config = """PyTorch built with:
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64
  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71049cd69a3df32adcccb623b12cd7baa22)
  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release, USE_MKL=ON
"""
    assert measure.library_versions_in(config) == {"mkl": "2024.2", "onednn": "3.12.0"}
    assert measure.blas(config) == "MKL"
    assert measure.blas("  - Build settings: BLAS_INFO=open, USE_MKL=OFF") == "OpenBLAS"
    assert measure.library_versions_in("  - OpenBLAS 0.3.29") == {"openblas": "0.3.29"}
    assert measure.blas("") == ""


def test_build_of_this_pytorch(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    found = measure.torch_build()
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert "limited_by" not in found
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert measure.torch_build()["limited_by"] == "avx2"
    assert set(measure.library_versions()) <= {
        *("mkl", "openblas", "onednn", "cuda", "cudnn", "nccl"),
    }


@pytest.mark.parametrize(("number", "text"), [(8902, "8.9.2"), (90100, "9.1.0"), (91002, "9.10.2")])
def test_version_of_cudnn_as_text(monkeypatch, number, text):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert measure.library_versions()["cudnn"] == text
