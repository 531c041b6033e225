"""Checkpoints that can be trusted: written in the background, committed atomically, verified before they are read.

save.py         what the training loop sees: resume, and the life of saves until they are committed
resume.py       which checkpoint is loaded: chosen, verified on all ranks, a damaged one quarantined
pace.py         after which steps a save is due
commit.py       COMMIT.json: what makes a directory a complete checkpoint, and how one is found damaged
commit_mode.py  how that happens: by a rename, or file by file on mounts of object stores
retention.py    which checkpoints go, and when their files do
lease.py        one writer per run: lease, epoch, and the lock of every commit
standalone.py   lease and ledger for ranks that no launcher started
dcp/            torch's Distributed Checkpoint, its private names included
    stager.py   in the trainer: the copy of the state, in kept shared memory
    planner.py  in the writer process: that copy as tensors again
    writer.py   there too: a save from the request to the commit
    shard.py    one rank's file, and its checksum
    process.py  the writer process itself: started, given work, ended
    reader.py   from a verified checkpoint back to tensors
"""
