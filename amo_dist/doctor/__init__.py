"""The command ``doctor``: checks that the optimizer runs on this machine or cluster."""
