"""Cantelop Kernels: Jupyter kernels that run as untrusted code, each in a microVM of its own.

This package is the host engine. Its `wire` and `relay` modules are also copied into the guest,
so this file and those two import nothing outside the standard library.
"""

__version__ = "0.1.0"
