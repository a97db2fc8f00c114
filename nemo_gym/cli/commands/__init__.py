"""One chapter per subject; a page of `nemo_gym.cli.pages` names the function that does the work of a command.

They turn options into calls, and print; what is done lies in the room that it is about.
"""
