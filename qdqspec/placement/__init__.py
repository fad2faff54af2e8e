"""Where Q/DQ pairs can stand, and putting them there."""
