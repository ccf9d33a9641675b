"""The API: HTTP calls in, request records out.

It validates what clients send, hands it to the router and shows what has become of it.
"""
