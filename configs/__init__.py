"""What the service is told, and how it refuses: settings, stage files, devices, errors.

The lowest layer. It knows no Redis, no Celery, no Flask and no torch, and imports nothing of the
layers above it. The YAML stage files that ship with the service lie beside the modules.
"""
