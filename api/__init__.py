"""The door: HTTP calls in, request records out.

Validates what clients send, hands it to the router and shows what has become of it. Knows Flask and
the routing layer. Knows no pipeline and no Celery worker: torch is never imported here.
"""
