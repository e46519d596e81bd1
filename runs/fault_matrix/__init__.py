"""A good drafter in real vLLM, healthy and with every fault that can be put there, and what `eyas diagnose` says."""
