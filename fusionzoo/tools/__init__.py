"""Applications: they use the library, which never imports them."""
