"""The truth about every accepted request: one memory-mapped file in the run directory.

Messages carry the work at full speed and may be lost with the process they were on their way to; the journal is what
stays. Each field has one writer. The word that publishes is written last and carries the generation of the record, so
that what an earlier request in the same slot left behind means nothing. ``layout`` has the bytes, and one module a
writer has what it may write: ``requests`` (prepare), ``tokens`` (execute), ``releases`` (summarize).
"""
