"""A checkpoint's tensors from its headers alone: names, dtypes, shapes. No weight is read, no torch needed."""

from eyas.inventory.folder import Glance, Inventory, glance, read
from eyas.inventory.tensor import TensorInfo

__all__ = ["Glance", "Inventory", "TensorInfo", "glance", "read"]
