"""What the ops launch on a GPU, one file an op: kernels in order, into memory that is allocated here.

Nothing of this is imported before an op runs on a GPU, because a machine without one need not have triton.
"""
