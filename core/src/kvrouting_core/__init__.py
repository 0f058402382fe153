"""The domain of kvrouting: caches, eviction, prefix index, routing. Pure: time and chance come in as arguments."""
