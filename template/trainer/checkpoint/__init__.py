"""Checkpoints that can be trusted: written in the background, committed atomically, verified before they are read.

commit.py     what makes a directory a complete checkpoint, and how one is found damaged
retention.py  which ones go, and how
lease.py      one writer per run
staging.py    the copy of the state that a save writes, in kept shared memory
writer.py     what the background process does with it
daemon.py     the background process itself
manager.py    what the training loop sees of all this
"""
