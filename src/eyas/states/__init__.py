"""States on disk: stored taps of records, written by ``eyas capture`` and read by training instead of the target.

    DIR/part-1-of-2/manifest.json        of which target and taps, and which record lies where
                    00000.safetensors    whole records, one after another, N tokens in all
                    00001.safetensors
    DIR/part-2-of-2/…

    input_ids    int32 [N]
    loss_mask    bool  [N]
    tap.2        [N, D]  bf16, or fp8 (e4m3) times  tap.2.scale  fp32 [N]
    tap.30       [N, D]  bf16 always: the last tap n

A tap is a tensor of its own, so that a drafter on fewer taps reads fewer bytes. Of the target's end the store keeps
tap n, before the final norm, not the normed state: the norm makes the second of the first (and costs nothing beside
the head), while the first cannot be had back from the second, and whoever asks later whether somebody mixed the two
up needs both. bf16 rounds each number relative to itself, so the labels are as good either way. Tap n is never fp8:
the labels come from it, and an error of up to a sixteenth of every number would reach them.

fp8 has a scale per token and tap, because taps differ in size by far and the first token outgrows all others.

Letters: B batch, T positions, D target width, C taps, N tokens of a shard.
"""

from eyas.states.manifest import HELD_OUT, TRAIN, Facts, Manifest, Shard
from eyas.states.store import StoredStates

__all__ = ["HELD_OUT", "TRAIN", "Facts", "Manifest", "Shard", "StoredStates"]
