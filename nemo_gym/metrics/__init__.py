"""Numbers computed from rollouts (statistics, pass@k, aggregation, intervals, coverage), and the page that shows them.

The public names live in `nemo_gym.reward_profile`.
"""
