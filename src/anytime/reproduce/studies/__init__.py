"""The studies, one function per figure or table of the paper."""
