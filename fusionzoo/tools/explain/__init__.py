"""`fusionzoo explain`: what each modality, word, region, column and second adds to an answer."""
