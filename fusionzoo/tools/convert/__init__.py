"""Write a data set as shards, and a pickle of features as a manifest."""
