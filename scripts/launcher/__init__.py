"""The launcher: starts the parts of the service on one host, restarts those that end, stops all.

The command line is `scripts/serve.py`.
"""
