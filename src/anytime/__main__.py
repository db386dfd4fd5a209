"""`python -m anytime` is `anytime`."""

from anytime.cli import main

main()
