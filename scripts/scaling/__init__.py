"""The sweep over replica counts: its plan, the service it restarts, and what scaling came of it.

The command line is `scripts/sweep.py`.
"""
