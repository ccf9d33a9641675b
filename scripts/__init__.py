"""Commands for people, and below them the packages they are made of.

The launcher (`serve`), clients and operators' tools (`generate`, `rolling_restart`), benches
(`diffusion_benchmark_serving`, `sweep`, `engine_bench`, `devices_bench`, `routing_bench`), the
bundled model (`train_tiny`, `check_tiny`) and the table of families (`models_table`).

May import every other package; none imports this one.
"""
