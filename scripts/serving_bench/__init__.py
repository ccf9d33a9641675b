"""The benchmark client: planned requests, how each backend sends them, and what came of it.

Knows the service by its HTTP calls only; imports neither api nor workers. The command line is
`scripts/diffusion_benchmark_serving.py`.
"""
