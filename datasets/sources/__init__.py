"""Sources of one's own data: a table (manifest), class folders, public layouts."""
