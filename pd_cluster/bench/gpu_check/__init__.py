"""Checks and measures the GPU path on a machine that has torch, triton and numpy, and no more.

Without a GPU everything runs on the CPU, Triton interpreted, at tiny sizes: that shows that the
check itself works, and its figures mean nothing.
"""
