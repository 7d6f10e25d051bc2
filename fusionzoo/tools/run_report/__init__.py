"""`fusionzoo report`: the page of a trained run."""
