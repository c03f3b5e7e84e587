"""How settings are read and explained. Loads no torch."""
