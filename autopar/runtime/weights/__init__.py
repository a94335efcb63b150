"""How weights lie on ranks and in files."""
