"""One chapter per subject; a page of `nemo_gym.cli.pages` names the function that does the work of a command.

What only one command needs lies beside its function.
"""
