"""Reports: HTML pages, SVG charts and the folder of a run."""

from __future__ import annotations

from anytime.evaluation.figures import figures
from anytime.report.folder import write_folder, write_report
from anytime.report.pages.card import card
from anytime.report.pages.page import render
from anytime.report.pages.verdict import verdict

__all__ = ["card", "figures", "render", "verdict", "write_folder", "write_report"]
