"""Kernels in Triton. Nothing outside this folder is written in it."""
