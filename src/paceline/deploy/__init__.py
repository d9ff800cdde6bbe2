"""Export of a trained model for programs in C, C++ and Fortran: ``paceline export``.

``native/`` is the library that these programs call. It is C, and needs neither Python nor PyTorch.
"""
