"""`FusionModel`: built, stored, loaded, and what it remembers."""
