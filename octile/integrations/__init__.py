"""Other libraries' models over octile's layers. `octile.convert` imports a module of this room for a library in use."""
