"""What the CUDA and the Triton backend share: the way from a problem to launches, without a kernel of either.

No module here imports Triton or CUDA's bindings.
"""
