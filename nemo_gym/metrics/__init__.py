"""Numbers computed from rollouts: statistics, pass@k, aggregation, intervals and coverage.

Everything here is pure: records in, numbers out. The public names live in `nemo_gym.reward_profile`.
"""
