"""What a run, a command or a call reads: its data, opened, and what identifies them."""
