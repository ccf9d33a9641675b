"""Tiny pipelines of diffusers' families with random weights, and what each was seen to do.

One module for each line of models; `catalog.py` lists them. The command line of the table of
models is `scripts/models_table.py`.
"""
