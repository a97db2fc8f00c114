"""What is observed of rollouts while they are made: model calls as servers captured them, and whole trajectories."""
