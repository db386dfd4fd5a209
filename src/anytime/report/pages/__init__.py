"""The HTML report and its sections."""
