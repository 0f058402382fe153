"""The `kvrouting` command: one name for every process of the product."""
