"""Decoding: ``plain`` is the oracle, ``loop`` plays rounds of ``chain`` drafts and one verify pass each."""
