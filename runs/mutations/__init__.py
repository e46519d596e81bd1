"""The mutation bench: drafters that are known to be good, broken on purpose, and what ``eyas check`` says of each.

    make mutations                                    everything; hours, and it says so first
    python -m runs.mutations --only 'taps *'          some rows again
    python -m runs.mutations --list                   what there is, and what was left out and why

A mutation makes a ``Subject`` out of a ``Bed``; ``naive`` plays it as an engine would that reads files as they stand,
``judge`` asks ``eyas check``, ``score`` compares. One file a group of kinds holds the mutations themselves.
"""
