"""What the API and the replicas share: records of requests, registry of replicas, router."""
