"""The Kubernetes operator of kvrouting: it runs pools of engines, sidecars and routers from KVRoutingPool objects.

Three steps, again and again for each pool: observe (I/O), plan (pure), apply (I/O).
"""
