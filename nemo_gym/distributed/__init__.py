"""Runs that outgrow one machine: their shards are run by an engine people already operate, Ray or Slurm."""
