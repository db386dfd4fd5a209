"""Tuning: the rule family, the frontier of rules, and rules chosen on held-out rows."""
