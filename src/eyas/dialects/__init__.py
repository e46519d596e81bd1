"""Outside spellings of a contract, one module each: what an engine reads, and what we must write for it."""
