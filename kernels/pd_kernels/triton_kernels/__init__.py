"""The operations in Triton, one file of the op's name each. Importing them needs `triton`.

They run on CUDA, and on the CPU where `TRITON_INTERPRET=1` was set before triton's first import.
None waits for the device, so all can be captured in a CUDA graph; what the CPU's kernels refuse by
reading index tensors (a page outside of the pool) is here up to the caller. What grows with traffic
is never a compile-time constant, nor specialised on: a new batch size compiles nothing.
"""
