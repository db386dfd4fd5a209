"""`python -m anytime.cli` is `anytime`."""

from anytime.cli import main

main()
