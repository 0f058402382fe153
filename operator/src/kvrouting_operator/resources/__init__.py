"""Pure builders: one for each kind of object that a pool owns."""
