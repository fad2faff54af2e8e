"""The accuracy of placements in a case: rehearsed, constrained, compared on the backend, and attributed to pairs."""
