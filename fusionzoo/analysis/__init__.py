"""What a data set needs of a fusion, and what a model makes of it: `pid` and `emap`."""
