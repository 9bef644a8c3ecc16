"""The source of truth about every accepted request: one memory-mapped file in the run directory.

Messages carry the work at full speed and may be lost together with the process they were sent to; the journal remains.
Each field has one writer. The word that publishes a record is written last and carries its generation, so that
leftovers of an earlier request in the same slot are ignored. ``layout`` defines the bytes; one module per writer
defines what it may write: ``requests`` (prepare), ``tokens`` (execute), ``releases`` (summarize).
"""
