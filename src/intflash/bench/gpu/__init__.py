"""What the experiments on a GPU run: timing, microbenchmarks, the step-by-step kernels. Needs Triton."""
