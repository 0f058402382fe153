"""Routing policies and engine models together on a virtual clock: same scenario, same bytes."""
