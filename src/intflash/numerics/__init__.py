"""Fixed-point arithmetic and integer exponentials; the specification is docs/numerics.md."""
