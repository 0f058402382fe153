"""The whole path on one machine: engines, sidecars and the router as processes of their own."""
