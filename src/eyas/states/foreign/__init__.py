"""States that other programs stored, read as data: which tensors there are, and of which record.

Which tap a tensor is, its place in a file does not prove; that is inferred from its values elsewhere.
"""

from eyas.states.foreign.folder import ForeignStates, open_states
from eyas.states.foreign.match import ForeignStock, as_stock
from eyas.states.foreign.sample import Sample, Stored

__all__ = ["ForeignStates", "ForeignStock", "Sample", "Stored", "as_stock", "open_states"]
