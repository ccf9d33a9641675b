"""The launcher: the parts of the service on one host, started, looked after and ended in order.

Knows processes, ports and logs; serves nothing itself. The command line is `scripts/serve.py`.
"""
