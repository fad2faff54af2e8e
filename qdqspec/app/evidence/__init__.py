"""What checks judge of a finished search: times, parity and culprits, builds and their kernels, baselines, inputs."""
