"""Where Q/DQ pairs can stand, and putting them there. May import floors 0 to 2."""
