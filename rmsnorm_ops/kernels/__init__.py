"""Triton kernels. Importing this package imports triton; nothing outside launch.py and inspect does."""
