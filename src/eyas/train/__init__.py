"""Training a drafter: ``train`` and what it is asked with and answers with."""

from eyas.train.config import Listener, Point, Progress, Silent, TrainConfig
from eyas.train.run import Run, train

__all__ = ["Listener", "Point", "Progress", "Run", "Silent", "TrainConfig", "train"]
