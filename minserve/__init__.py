"""minserve: how LLM serving works, by building one that works."""

__version__ = "0.1.0"
