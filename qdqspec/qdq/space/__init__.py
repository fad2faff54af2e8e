"""The search space: units of operators with their labels, and the pairs of each choice."""
