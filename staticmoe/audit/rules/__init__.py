"""The kinds of faults, one family a file: what they are called and mean, and checks that need no iteration."""
