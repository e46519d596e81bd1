"""Two or more ways of decoding, timed side by side on the same prompts.

The sides take turns prompt by prompt, and the order within a turn flips each time, so that a machine that
warms up or slows down does so for all of them. The first side is the baseline of every ratio. Counts and
seconds are stored per turn, everything else is derived; intervals resample prompts.

An answer *loops* when more than 30 % of its 8-grams repeat an earlier one of the same answer. Looping text is
easier to draft than text worth having, so every number is also given without the prompts where any side's
answer loops.

``sides`` what a side says, ``running`` the turns, ``summary`` what follows, ``settings`` and ``flags`` what to run
with, ``url`` a server as a side, ``predict`` what may be had before there is a drafter.
"""

from eyas.bench.running import Listener, run
from eyas.bench.settings import NO_SPECULATION, Recommendation, Setting, recommend
from eyas.bench.sides import LOOPS_ABOVE, NGRAM, Fault, Repeats, Side, SideResult, Turn, repeats
from eyas.bench.summary import DRAWS, Bench, Cost, SideSummary

__all__ = [
    "DRAWS",
    "LOOPS_ABOVE",
    "NGRAM",
    "NO_SPECULATION",
    "Bench",
    "Cost",
    "Fault",
    "Listener",
    "Recommendation",
    "Repeats",
    "Setting",
    "Side",
    "SideResult",
    "SideSummary",
    "Turn",
    "recommend",
    "repeats",
    "run",
]
