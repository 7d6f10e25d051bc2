"""What all other rooms share: names, cells, plug-ins, progress, the console."""
