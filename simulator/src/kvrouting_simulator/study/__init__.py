"""Studies: many scenarios that differ along axes, run side by side, and pages that say what they show."""
