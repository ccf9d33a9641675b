"""What the door and the replicas share: the request record, the registry of replicas, the router.

Knows Redis and Celery's sending side. Knows no Flask, no torch and no pipeline.
"""
