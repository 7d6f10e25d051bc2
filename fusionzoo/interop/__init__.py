"""Models of fusionzoo inside other libraries."""
