"""What `eyas bench` is made of: its sides, its prediction, and where its result goes."""
