"""The description of the package: the README with links that work outside of the repository, as on PyPI.

Everything else is in pyproject.toml. With `[project.urls] Source` there, the links of the README lead to that repository, and
its pictures are shown. Without a public address both would be broken: links become plain text, and pictures are left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)(\n\n\*[^*]+\*)?")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)]+)\)")


def describe(readme: str, source: str | None) -> str:
    """The README for a reader who has no checkout.

    Args:
        readme: Its text.
        source: The address of the repository, such as `https://host/owner/name`, if there is one.
    """
    if source is None:
        return re.sub(r"\n{3,}", "\n\n", _LINK.sub(r"\1", _PICTURE.sub("", readme)))
    shown = _PICTURE.sub(rf"![\1]({source}/raw/HEAD/\2)\3", readme)
    return _LINK.sub(rf"[\1]({source}/blob/HEAD/\2)", shown)


if __name__ == "__main__":
    urls = tomllib.loads((HERE / "pyproject.toml").read_text())["project"].get("urls", {})
    text = describe((HERE / "README.md").read_text(encoding="utf-8"), urls.get("Source"))
    setup(long_description=text, long_description_content_type="text/markdown")
