"""Results as people read them: ``terminal`` (text and JSON) and ``page`` (one self-contained HTML file)."""
