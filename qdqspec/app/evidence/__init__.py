"""What checks judge of a finished search: measured times, parity, culprits, kernels, other runtimes."""
