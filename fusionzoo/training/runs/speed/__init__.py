"""`--speed auto`: settings chosen by a short measurement before the work begins."""
