"""The bundled model: the little world it knows, its networks, and how its pictures are read back.

The command lines are `scripts/train_tiny.py` and `scripts/check_tiny.py`.
"""
