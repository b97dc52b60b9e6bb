"""Triton kernels. Importing this package imports triton; prepared.py does so at the first launch."""
