"""How close outputs are, and the data they are compared on."""
