"""The page at `/`: its files, the answers that it shows, traffic for its load view, and the report card of what was asked.

`routes` has the addresses under `/page`, `thinking` runs one input under two rules, `traffic` generates a bounded load,
`watch` samples the requests of others, `examples` are the inputs to pick from. The files themselves are in `anytime.page`.
"""

from anytime.serve.page.routes import PUBLIC, Page

__all__ = ["PUBLIC", "Page"]
