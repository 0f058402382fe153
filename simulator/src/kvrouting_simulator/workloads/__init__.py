"""Requests to replay: seeded generators, readers of published traces, and the clients that send them."""
