"""Triton kernels, used on CUDA only; the plain torch versions beside their callers are the reference."""
