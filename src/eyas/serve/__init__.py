"""An OpenAI-compatible HTTP server over eyas's own decoder.

guard ──> app ──> asked (bodies) ──> service ──> player ──> answering ──> decode
host, key,        prompts, limits    queue,      one thread,
size              and laws           timeouts    a step each in turn
"""

from eyas.serve.answering import Answering
from eyas.serve.run import Server, bound, require_safe, serve
from eyas.serve.service import Service
from eyas.serve.settings import Settings

__all__ = ["Answering", "Server", "Service", "Settings", "bound", "require_safe", "serve"]
