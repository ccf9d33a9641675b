"""The benchmark of a service over HTTP: planned requests, how they are sent, and the figures.

The commands are `scripts/diffusion_benchmark_serving.py` and, over numbers of replicas,
`scripts/sweep.py`.
"""
