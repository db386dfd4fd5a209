"""The page that shows a network think: its files, and recorded answers for a copy that works without a server.

`anytime serve` serves the files at `/` (`anytime.serve.page` has the routes); `write_page` puts them and the recorded answers
into one HTML file.
"""

from anytime.page.assets import POLICY, index, script_files, style
from anytime.page.file import is_page, make_page, write_page

__all__ = ["POLICY", "index", "is_page", "make_page", "script_files", "style", "write_page"]
