"""What only a GPU can show, in one table: ``make gpu-checks``."""
