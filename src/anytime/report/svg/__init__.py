"""SVG charts as text: scales, colours, line charts, reliability diagrams."""
