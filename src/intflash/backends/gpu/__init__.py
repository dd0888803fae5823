"""What the CUDA and the Triton backend share: how a problem becomes launches. The kernels themselves are each backend's
own.

No module here imports Triton or CUDA's bindings.
"""
