"""Why the launcher does not start: one line for people and an exit code.

Problems of the environment and the stage file are ``configs.errors.ConfigurationError`` instead.
"""

from __future__ import annotations


class StartRefused(Exception):
    """Raised when something this machine or the network should have is not there; exit code 1."""
