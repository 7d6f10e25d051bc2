"""Models that scikit-learn or TabICL fit once on frozen features: the rows to beat."""
