"""The replicas: ``celery -A workers worker -Q replica0`` makes this process replica0.

One process is one replica: one Celery worker on its own queue, one pipeline on its own device
chunk.
"""
