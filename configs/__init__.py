"""What the service is told, and how it refuses: settings, stage files, devices, errors.

The YAML stage files that ship with the service lie beside the modules.
"""
