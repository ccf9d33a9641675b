"""The engine of a replica: it loads a pipeline and runs requests on it, alone or with each other.

Begin at ``workers.engine.engine``. Knows no Redis, no Celery, no HTTP and no file format.
"""
