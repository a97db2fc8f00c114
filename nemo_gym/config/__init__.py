"""The steps of reading a configuration; `nemo_gym.global_config` tells how they follow one another."""
