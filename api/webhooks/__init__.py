"""The worker that sends webhooks."""
