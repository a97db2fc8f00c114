"""Who runs a collection: this process, or an engine for many machines that people already operate, Ray or Slurm."""
