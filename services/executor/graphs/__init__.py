"""Recording steps and replaying them: CUDA graphs, and recorded steps on CPUs."""
