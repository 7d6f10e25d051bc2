"""One value, decoded within budgets: images, audio, video, arrays, text."""
